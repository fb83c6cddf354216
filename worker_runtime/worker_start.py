"""The order in which a worker comes up, over any engine, transport and host: in a process and in the simulation.

1  registration opened     it takes the next generation; the record is renewed from now on, its state is STARTING
2  engine started          its claims go to the feed from before its first step
3  server started          the record has its address
4  feed opened             what the generation before has claimed is void
5  state READY published   a reader that sees this generation ready finds its claims
6  engine watched          the record says when it hangs; one that does not come back ends the worker
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_core.background import BackgroundTasks
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineInfo
from cluster_wire.redis_client import RedisClient
from cluster_wire.secret import Secret
from worker_runtime import stall_watch
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.registration import Registration
from worker_runtime.service import WorkerServiceBase
from worker_runtime.wire_conversion import to_wire

ServiceFactory = Callable[[Engine, wire.WorkerRegistration, Callable[[], None], ClaimFeed], WorkerServiceBase]


@dataclass(frozen=True, slots=True)
class RegistryPlace:
    """Where a worker registers and writes its claims."""

    # A client of the service's Redis, which its user closes. Redis is waited for as long as the lease lasts at most.
    connect: Callable[[], RedisClient]
    service_id: str
    # Of the registration.
    lease_s: float
    index: IndexSection
    # How long an engine may hang.
    stall_timeout_s: float
    # Of the service, where it has one.
    secret: Secret | None = None


class Server(Protocol):
    async def start(self, servicer: WorkerServiceBase) -> str:
        """Where it listens."""
        ...

    def state_changed(self) -> None:
        """The record has another state."""
        ...


class WorkerPorts(Protocol):
    """What differs between a worker's process and the simulation."""

    async def take_generation(self, registration: Registration) -> int:
        """Opens the registration."""
        ...

    def make_engine(self, generation: int) -> Engine: ...

    async def start_engine(self, engine: Engine, registration: Registration) -> EngineInfo: ...

    def make_server(self) -> Server: ...

    def make_service(
        self, engine: Engine, record: wire.WorkerRegistration, on_state: Callable[[], None], feed: ClaimFeed
    ) -> WorkerServiceBase: ...

    def give_up(self, why: str) -> None:
        """The engine is of no use any more: the worker ends, and is started again by whoever keeps it."""
        ...

    async def with_retries(self, write: Callable[[], Awaitable[None]]) -> None:
        """Until Redis has answered: a model that took minutes to load is not given up because it is away."""
        ...


class WorkerStart:
    """One start of one worker. record: its own, kept up to date from the engine's figures."""

    def __init__(
        self, place: RegistryPlace, record: wire.WorkerRegistration, clock: ClusterClock, ports: WorkerPorts
    ) -> None:
        # What runs as long as the worker does.
        self.background = BackgroundTasks()
        self.registration = Registration(
            place.connect(), place.service_id, record, place.lease_s, self._bring_up_to_date, clock, place.secret
        )
        self._place = place
        self._record = record
        self._ports = ports
        self._engine: Engine | None = None
        self._feed: ClaimFeed | None = None

    async def bring_up(self, ends: AsyncExitStack) -> WorkerServiceBase:
        """Returns once it serves. What is to be ended goes to `ends`, apart from what the ports have made."""
        ports, place, record, registration = self._ports, self._place, self._record, self.registration
        generation = await ports.take_generation(registration)
        engine = self._engine = ports.make_engine(generation)
        feed = self._feed = ClaimFeed(
            place.connect(),
            place.service_id,
            record.worker_id,
            generation,
            place.index,
            on_superseded=registration.superseded,
            count_stored_blocks=lambda: engine.status().counters.stored_blocks,
        )
        ends.push_async_callback(feed.close)
        ends.push_async_callback(registration.close)
        self.background.start(registration.keep())
        ends.push_async_callback(self.background.cancel)
        engine.follow_claims(feed.changed)
        info = await ports.start_engine(engine, registration)
        record.model.CopyFrom(to_wire(info, wire.ModelInfo))
        record.block_size_tokens = info.block_size_tokens
        record.max_running_requests = info.max_running_requests
        server = ports.make_server()

        def on_state() -> None:
            registration.changed()
            server.state_changed()

        servicer = ports.make_service(engine, record, on_state, feed)
        record.address = await server.start(servicer)
        await ports.with_retries(feed.open)
        self.background.start(feed.keep())
        record.phase = "serving"
        record.state = wire.WORKER_STATE_READY
        await ports.with_retries(registration.publish)
        server.state_changed()
        watching = stall_watch.watch(
            engine, on_change=registration.changed, give_up=ports.give_up, give_up_after_s=place.stall_timeout_s
        )
        self.background.start(watching)
        return servicer

    def _bring_up_to_date(self) -> None:
        """What changes all the time and is as good as the last renewal."""
        if self._engine is None:
            return
        status = self._engine.status()
        self._record.load.CopyFrom(to_wire(status.load, wire.WorkerLoad))
        self._record.costs.CopyFrom(to_wire(status.costs, wire.WorkerCosts))
        self._record.cacheable_requests = status.counters.cacheable_requests
        if self._feed is not None:
            self._record.stored_blocks = self._feed.stored_blocks
            self._record.claims_sequence = self._feed.claims_sequence
