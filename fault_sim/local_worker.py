"""One start of one worker in the simulation: what `worker_runtime.host` is in a process, with a block engine."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_configs.schema import RachisConfig
from cluster_core.background import BackgroundTasks
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineInfo
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from decode_worker.service import DecodeService
from fault_sim.blocks.engine import BlockEngine
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.local_grpc.server import LocalServer
from fault_sim.local_grpc.transport import LocalTransport
from prefill_worker.service import PrefillService
from shared_worker.service import SharedService
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.registration import Registration
from worker_runtime.service import WorkerServiceBase
from worker_runtime.worker_start import RegistryPlace, WorkerStart

_RETRY_S = 0.25
_POOLS = {"prefill": wire.POOL_PREFILL, "decode": wire.POOL_DECODE, "shared": wire.POOL_SHARED}


class LocalWorker:
    """Starts at once, and runs until it is killed or stopped. redis: makes its clients. clock: of its host."""

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
        # Once it has a generation.
        self.engine: BlockEngine | None = None
        # It serves.
        self.is_ready = False
        self._config = config
        self._transport = transport
        self._fabric = fabric
        self._settings = settings
        self._clock = clock
        self.record = wire.WorkerRegistration(
            worker_id=name,
            pool=_POOLS[name.partition("-")[0]],
            state=wire.WORKER_STATE_STARTING,
            phase="starting",
        )
        self._server: LocalServer | None = None
        lease_s = config.redis.worker_lease_s
        stall_timeout_s = config.limits.stall_timeout_s
        place = RegistryPlace(lambda: redis(lease_s), service_id, lease_s, config.index, stall_timeout_s)
        self._ending = BackgroundTasks()
        self._worker = WorkerStart(place, self.record, clock, self)
        self._main = asyncio.create_task(self._start())

    async def kill(self) -> None:
        """Without a word: what it still does has no effect. Returns once all of it has ended."""
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
        """As its service does for a call that says so."""
        if self.is_ready:
            self.record.state = wire.WORKER_STATE_DRAINING if draining else wire.WORKER_STATE_READY
            self._worker.registration.changed()

    async def _end(self) -> None:
        self.is_ready = False
        tasks = [self._main, *self._worker.background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        # It is never closed: what a worker leaves behind when it ends is left behind here.
        await self._worker.bring_up(AsyncExitStack())
        self.is_ready = True

    # Its ports; see `worker_start.WorkerPorts`. Redis that is away is waited for.

    async def take_generation(self, registration: Registration) -> int:
        await self.with_retries(registration.open)
        return self.record.generation

    def make_engine(self, generation: int) -> BlockEngine:
        self.engine = BlockEngine(self.name, f"{self.name}@{generation}", self._fabric, self._settings, self._clock)
        return self.engine

    async def start_engine(self, engine: Engine, registration: Registration) -> EngineInfo:
        return await engine.start(lambda phase: None, lambda why: None)

    def make_server(self) -> "_Server":
        self._server = self._transport.server(self.name)
        return _Server(self.name, self._server)

    def make_service(
        self, engine: Engine, record: wire.WorkerRegistration, on_state: Callable[[], None], feed: ClaimFeed
    ) -> WorkerServiceBase:
        if record.pool == wire.POOL_DECODE:
            return DecodeService(engine, record, on_state, feed)
        interval_ms = self._config.streaming.progress_interval_ms
        if record.pool == wire.POOL_SHARED:
            return SharedService(engine, record, on_state, feed, progress_interval_ms=interval_ms)
        return PrefillService(engine, record, on_state, feed, progress_interval_ms=interval_ms)

    def give_up(self, why: str) -> None:
        """As a process that ends itself; nobody starts it again."""
        self._ending.start(self.kill())

    async def with_retries(self, write: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await write()
                return
            except REDIS_DOWN:
                await asyncio.sleep(_RETRY_S)


class _Server:
    """A local server as a worker starts it; it has no health to follow."""

    def __init__(self, host: str, server: LocalServer) -> None:
        self._host = host
        self._server = server

    async def start(self, servicer: WorkerServiceBase) -> str:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server)  # type: ignore[arg-type]
        port = self._server.add_insecure_port(f"{self._host}:0")
        await self._server.start()
        return f"{self._host}:{port}"

    def state_changed(self) -> None:
        """Nothing looks at it."""
