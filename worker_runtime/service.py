"""WorkerService, as far as both kinds of worker answer it alike: status, draining, releases, fencing by generation.

The two subclasses, `prefill_worker.service` and `decode_worker.service`, add the call of their pool; the other
pool's call is UNIMPLEMENTED.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn, TypeVar

import grpc
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core import event_log
from cluster_core.clock import unix_ms
from cluster_core.engine import Engine
from cluster_core.engine_jobs import Adapter, EngineJob, KvLease
from cluster_core.engine_reports import HotPrefix
from cluster_core.errors import (
    AdapterNotLoadedError,
    DrainingError,
    InvalidInputError,
    NotSupportedError,
    RachisError,
    StaleGenerationError,
    UnavailableError,
)
from cluster_core.log_files import ReadLogs
from cluster_core.log_reader import LogReader
from cluster_wire import calls
from cluster_wire.calls import Context
from cluster_wire.log_messages import events_to_wire, query_from_wire
from worker_runtime.claim_feed import ClaimAudit
from worker_runtime.memory_use import ResidentMemory, node_memory
from worker_runtime.own_logs import no_logs
from worker_runtime.wire_conversion import claims_to_wire, from_wire, to_wire

logger = logging.getLogger(__name__)

MOST_HOTTEST_PREFIXES = 100
MOST_BATCH_ENTRIES = 100
# An engine looks for them between two steps; one that is in a long step is not waited for any longer.
LOOK_TIMEOUT_S = 1.0

_Found = TypeVar("_Found")


class WorkerServiceBase(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine. `registration` is the worker's own record, changed here when it drains."""

    def __init__(
        self,
        engine: Engine,
        registration: wire.WorkerRegistration,
        on_state: Callable[[], None],
        claim_feed: ClaimAudit | None = None,
        logs: ReadLogs = no_logs,
    ) -> None:
        """claim_feed: where the worker tells an index what it has cached. logs: of the service on this host."""
        self._engine = engine
        self._claim_feed = claim_feed
        self._logs = LogReader(logs)
        self._registration = registration
        self._on_state = on_state
        self._resident_memory = ResidentMemory()
        self._calls = 0
        self._moving: asyncio.TimerHandle | None = None
        # Set while sessions that still take input are to go to another worker.
        self._sessions_move = asyncio.Event()

    async def Prefill(self, request: wire.PrefillRequest, context: Context) -> wire.PrefillResponse:
        await abort(context, NotSupportedError(f"{self._registration.worker_id} is no prefill worker"))

    async def PrefillSession(  # type: ignore[override]  # it reads and writes through the context
        self, request_iterator: AsyncIterator[wire.PrefillSessionRequest], context: Context
    ) -> None:
        await abort(context, NotSupportedError(f"{self._registration.worker_id} is no prefill worker"))

    async def Decode(self, request: wire.DecodeRequest, context: Context) -> AsyncIterator[wire.DecodeResponse]:
        await abort(context, NotSupportedError(f"{self._registration.worker_id} is no decode worker"))
        yield wire.DecodeResponse()  # type: ignore[unreachable]  # a stream has to be a generator

    async def StreamOutputs(  # type: ignore[override]  # it reads and writes through the context
        self, request_iterator: AsyncIterator[wire.StreamOutputsRequest], context: Context
    ) -> None:
        await abort(context, NotSupportedError(f"{self._registration.worker_id} is no decode worker"))

    async def HandOver(self, request: wire.HandOverRequest, context: Context) -> wire.HandOverResponse:
        await abort(context, NotSupportedError(f"{self._registration.worker_id} is no decode worker"))

    async def ReleaseHandoff(
        self, request: wire.ReleaseHandoffRequest, context: Context
    ) -> wire.ReleaseHandoffResponse:
        async with answering(context):
            self._fence(request.generation)
            return wire.ReleaseHandoffResponse(released=await self._engine.release(request.lease_id))

    async def GetWorkerStatus(
        self, request: wire.GetWorkerStatusRequest, context: Context
    ) -> wire.GetWorkerStatusResponse:
        status = self._engine.status()
        prefixes = min(request.hottest_prefixes, MOST_HOTTEST_PREFIXES) if status.tiers is not None else 0
        entries = min(request.batch_entries, MOST_BATCH_ENTRIES) if status.decode is not None else 0
        hottest, batch = await asyncio.gather(
            _in_time(self._engine.hottest_prefixes, prefixes), _in_time(self._engine.decode_batch, entries)
        )
        node_bytes, available_bytes = node_memory()
        return to_wire(
            status,
            wire.GetWorkerStatusResponse,
            registration=self._registration,
            load=to_wire(status.load, wire.WorkerLoad, active_calls=self.active_calls),
            counters=to_wire(
                status.counters,
                wire.WorkerCounters,
                resident_bytes=self._resident_memory.bytes(),
                log_lines_lost=event_log.lost_lines(),
                node_memory_bytes=node_bytes,
                node_available_bytes=available_bytes,
            ),
            hottest=_hottest(hottest) if hottest is not None else None,
            batch=to_wire(batch, wire.DecodeBatch) if batch is not None else None,
        )

    async def SetDraining(self, request: wire.SetDrainingRequest, context: Context) -> wire.SetDrainingResponse:
        if request.draining:
            moves = request.HasField("move_sessions_after_ms")
            self.start_draining(request.move_sessions_after_ms / 1000 if moves else None)
        else:
            self._stop_draining()
        return wire.SetDrainingResponse(state=self._registration.state)

    def start_draining(self, move_sessions_after_s: float | None) -> None:
        """Nothing new is taken. Sessions that still take input after so long are given back; None: they stay."""
        self._stop_moving()
        if move_sessions_after_s is not None:
            self._moving = asyncio.get_running_loop().call_later(move_sessions_after_s, self._sessions_move.set)
        self._registration.state = wire.WORKER_STATE_DRAINING
        self._on_state()
        self._look_whether_drained()

    def is_idle(self) -> bool:
        """It computes nothing, nobody has blocks of it to pull any more, and its routers have all that it has said."""
        load = self._engine.status().load
        return not (self.active_calls or load.running_requests or load.waiting_requests or load.leased_handoffs)

    @property
    def active_calls(self) -> int:
        """Calls under way, and ended ones whose answers a router has not taken yet."""
        return self._calls

    def work_seen(self) -> int | None:
        """How many requests have come, once it is idle; None while it is not."""
        return self._engine.status().counters.requests if self.is_idle() else None

    def _stop_draining(self) -> None:
        self._stop_moving()
        self._registration.state = wire.WORKER_STATE_READY
        self._on_state()

    def _stop_moving(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        self._sessions_move.clear()

    async def GetPrefixClaims(
        self, request: wire.GetPrefixClaimsRequest, context: Context
    ) -> wire.GetPrefixClaimsResponse:
        async with answering(context):
            if self._claim_feed is None:
                raise NotSupportedError(f"{self._registration.worker_id} tells no index what it has cached")
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    sequence, claims = await self._claim_feed.audit(self._engine)
            except TimeoutError:
                raise UnavailableError("the engine did not get to it in time", retry_after_ms=1000) from None
            return claims_to_wire(self._registration.generation, sequence, claims)

    async def PrepareAdapter(
        self, request: wire.PrepareAdapterRequest, context: Context
    ) -> wire.PrepareAdapterResponse:
        async with answering(context):
            if not request.adapter.path:
                raise InvalidInputError("must be given", field="adapter.path")
            async with self._held(from_wire(request.adapter, Adapter)) as digest:
                return wire.PrepareAdapterResponse(digest=digest)

    async def DropAdapter(self, request: wire.DropAdapterRequest, context: Context) -> wire.DropAdapterResponse:
        async with answering(context):
            await self._engine.unload_adapter(request.digest)
            self._on_adapters()
            return wire.DropAdapterResponse(is_loaded=request.digest in self._engine.adapters())

    async def ReadLogs(self, request: wire.ReadLogsRequest, context: Context) -> wire.ReadLogsResponse:
        async with answering(context):
            read_unix_ms = unix_ms()
            told = await self._logs.read(query_from_wire(request.query))
            return wire.ReadLogsResponse(
                events=events_to_wire(told.events), read_unix_ms=read_unix_ms, left_out=told.left_out
            )

    @asynccontextmanager
    async def _holding(self, job: EngineJob) -> AsyncIterator[None]:
        """Around a job, whose adapter stays loaded. Raises AdapterNotLoadedError."""
        if job.adapter is None:
            yield
            return
        if not job.adapter.digest:
            raise InvalidInputError("must be given", field="adapter.digest")
        async with self._held(job.adapter):
            yield

    @asynccontextmanager
    async def _held(self, adapter: Adapter) -> AsyncIterator[str]:
        try:
            async with self._engine.holding(adapter) as digest:
                self._on_adapters()
                yield digest
        except AdapterNotLoadedError:
            # Another one may have left for it.
            self._on_adapters()
            raise

    def _on_adapters(self) -> None:
        """The registration says at once which adapters are loaded."""
        loaded = sorted(self._engine.adapters())
        if loaded != list(self._registration.adapters):
            self._registration.adapters[:] = loaded
            self._on_state()

    @contextmanager
    def _taken(self, request: wire.PrefillRequest | wire.PrefillSessionOpen | wire.DecodeRequest) -> Iterator[None]:
        """Around a call for tokens. Raises StaleGenerationError or DrainingError when it must not be taken."""
        self._fence(request.generation)
        if self._registration.state == wire.WORKER_STATE_DRAINING:
            raise DrainingError(f"worker {self._registration.worker_id} is draining")
        self._calls += 1
        try:
            with event_log.attempt(request.request_id, request.named.request_id, request.named.trace_id):
                yield
        finally:
            self._calls -= 1
            self._look_whether_drained()

    def _look_whether_drained(self) -> None:
        if not self._calls and self._registration.state == wire.WORKER_STATE_DRAINING:
            self._on_drained()

    def _on_drained(self) -> None:
        """The worker drains, and has no call for tokens."""

    def _handoff(self, lease: KvLease) -> wire.KvHandoff:
        registration = self._registration
        return to_wire(lease, wire.KvHandoff, worker_id=registration.worker_id, generation=registration.generation)

    def _fence(self, generation: int) -> None:
        if generation != self._registration.generation:
            raise StaleGenerationError(
                f"the call is for generation {generation} of {self._registration.worker_id}, "
                f"this is {self._registration.generation}"
            )


def _hottest(prefixes: Iterable[HotPrefix]) -> wire.HottestPrefixes:
    return wire.HottestPrefixes(prefixes=[to_wire(each, wire.HotPrefix) for each in prefixes])


async def _in_time(look: Callable[[int], Awaitable[_Found]], at_most: int) -> _Found | None:
    """None: nothing was asked for, or the engine did not get to it."""
    if not at_most:
        return None
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            return await look(at_most)
    except TimeoutError:
        return None


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """Turns the errors of our tree into statuses; whatever else is raised becomes INTERNAL by gRPC itself."""
    try:
        yield
    except RachisError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        logger.exception("a call failed on a defect")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error, the worker's log says more")


async def abort(context: Context, error: RachisError) -> NoReturn:
    await context.abort(calls.status_code(error), str(error), calls.trailing_metadata(error))
    raise AssertionError("abort raises")
