"""One start of one worker: what `worker_runtime.host` does in a process, with a block engine, in the simulation."""

import asyncio
from collections.abc import Awaitable, Callable

from rachis.redis_client import REDIS_DOWN, RedisClient
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_configs.schema import RachisConfig
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from decode_worker.service import DecodeService
from fault_sim.blocks.engine import BlockEngine
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.local_grpc.server import LocalServer
from fault_sim.local_grpc.transport import LocalTransport
from prefill_worker.service import PrefillService
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.registration import Registration
from worker_runtime.service import WorkerServiceBase
from worker_runtime.wire_conversion import to_wire

_RETRY_S = 0.25


class LocalWorker:
    """`run` until it is killed or stopped. engine: once it has a generation; is_ready: it serves.

    redis: makes its clients. clock: of its host, which may be wrong.
    """

    def __init__(
        self,
        name: str,
        config: RachisConfig,
        service_id: str,
        transport: LocalTransport,
        redis: Callable[[float], RedisClient],
        fabric: Fabric,
        settings: BlockEngineSettings,
        clock: ClusterClock,
    ) -> None:
        self.name = name
        self.engine: BlockEngine | None = None
        self.is_ready = False
        self._config = config
        self._service_id = service_id
        self._transport = transport
        self._redis = redis
        self._fabric = fabric
        self._settings = settings
        self._clock = clock
        is_prefill = name.startswith("prefill")
        self.record = wire.WorkerRegistration(
            worker_id=name,
            pool=wire.POOL_PREFILL if is_prefill else wire.POOL_DECODE,
            state=wire.WORKER_STATE_STARTING,
            phase="starting",
        )
        self._make_service = self._prefill_service if is_prefill else DecodeService
        self._server: LocalServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._main = asyncio.create_task(self._start())

    async def kill(self) -> None:
        """Without a word: what it still does reaches nobody. Returns once all of it has ended."""
        if self._server is not None:
            self._server.kill()
        if self.engine is not None:
            self.engine.die("killed")
        await self._end()
        if self._server is not None:
            await self._server.ended()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)
        await self._end()
        if self.engine is not None:
            await self.engine.stop()

    def set_draining(self, *, draining: bool) -> None:
        """As its service does when it is told so."""
        if self.is_ready:
            self.record.state = wire.WORKER_STATE_DRAINING if draining else wire.WORKER_STATE_READY
            self._registration.changed()

    async def _end(self) -> None:
        self.is_ready = False
        tasks = [self._main, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        """In the order of `worker_runtime.host`. Redis that is away is waited for."""
        lease_s = self._config.redis.worker_lease_s
        registration = Registration(
            self._redis(lease_s), self._service_id, self.record, lease_s, self._bring_up_to_date, self._clock
        )
        self._registration = registration
        await _retried(registration.open)
        engine_id = f"{self.name}@{self.record.generation}"
        engine = BlockEngine(self.name, engine_id, self._fabric, self._settings, self._clock)
        self.engine = engine
        self._feed = ClaimFeed(
            self._redis(lease_s),
            self._service_id,
            self.name,
            self.record.generation,
            self._config.index,
            on_superseded=registration.superseded,
            count_stored_blocks=lambda: engine.status().counters.stored_blocks,
        )
        self._tasks.append(asyncio.create_task(registration.keep()))
        engine.follow_claims(self._feed.changed)
        info = await engine.start(lambda phase: None, lambda why: None)
        self.record.model.CopyFrom(to_wire(info, wire.ModelInfo))
        self.record.block_size_tokens = info.block_size_tokens
        self.record.max_running_requests = info.max_running_requests
        server = self._server = self._transport.server(self.name)
        servicer = self._make_service(engine, self.record, registration.changed, self._feed)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
        self.record.address = f"{self.name}:{server.add_insecure_port(f'{self.name}:0')}"
        await server.start()
        await _retried(self._feed.open)
        self._tasks.append(asyncio.create_task(self._feed.keep()))
        self.record.phase = "serving"
        self.record.state = wire.WORKER_STATE_READY
        await _retried(registration.publish)
        self.is_ready = True

    def _bring_up_to_date(self) -> None:
        if self.engine is None:
            return
        status = self.engine.status()
        self.record.load.CopyFrom(to_wire(status.load, wire.WorkerLoad))
        self.record.costs.CopyFrom(to_wire(status.costs, wire.WorkerCosts))
        self.record.cacheable_requests = status.counters.cacheable_requests
        self.record.stored_blocks = self._feed.stored_blocks
        self.record.claims_sequence = self._feed.claims_sequence

    def _prefill_service(
        self, engine: Engine, record: wire.WorkerRegistration, on_state: Callable[[], None], feed: ClaimFeed
    ) -> WorkerServiceBase:
        interval_ms = self._config.streaming.progress_interval_ms
        return PrefillService(engine, record, on_state, feed, progress_interval_ms=interval_ms)


async def _retried(write: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await write()
            return
        except REDIS_DOWN:
            await asyncio.sleep(_RETRY_S)
