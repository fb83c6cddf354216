"""One worker process: engine, WorkerService and registration, brought up and taken down in order.

It runs on an asyncio loop of its own thread, so the process it lives in (a Ray actor, a test) only has to call
`start_in_background` and `stop`. A dead engine ends the process: Ray starts the worker again, under a new generation.
So does SIGTERM, after the worker has drained. A worker that nobody keeps any more retires: it is not started again.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from rachis.v1 import worker_pb2 as wire
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from cluster_configs.loading import masked
from cluster_core import versions
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import StartError
from cluster_core.versions import Versions
from cluster_wire.redis_client import REDIS_DOWN, complaint, connect
from cluster_wire.secret import Secret
from worker_runtime import own_node
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment
from worker_runtime.orphans import Keeper, until_orphaned
from worker_runtime.own_node import NODE, NodePlace
from worker_runtime.registration import Registration
from worker_runtime.service import WorkerServiceBase
from worker_runtime.wire_conversion import to_wire
from worker_runtime.worker_server import WorkerServer
from worker_runtime.worker_start import RegistryPlace, ServiceFactory, WorkerStart

logger = logging.getLogger(__name__)

ENGINE_DIED_EXIT_CODE = 70
START_FAILED_EXIT_CODE = 71
FAILURE_LINGER_S = 15.0
_RETRY_S = 0.25
_DRAIN_POLL_S = 0.25
# A worker stays a moment after it ran out of work: routers may not have read yet that it takes nothing new.
_IDLE_POLLS = 4
_POOLS = {
    EngineRole.PREFILL: wire.POOL_PREFILL,
    EngineRole.DECODE: wire.POOL_DECODE,
    EngineRole.SHARED: wire.POOL_SHARED,
}


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What one worker is started with."""

    worker_id: str
    service_id: str
    engine: EngineSettings
    redis_url: str
    redis_lease_s: float
    max_message_bytes: int
    start_timeout_s: float
    # Of the service; the worker's have to fit.
    versions: Versions = field(default_factory=Versions)
    # What a worker whose process is asked to end leaves to what it runs, and to sessions that still take input.
    drain_timeout_s: float = 600.0
    session_grace_s: float = 5.0
    # How long its engine may hang in one step, command or copy.
    stall_timeout_s: float = 60.0
    # Of the service's secret, which the worker's host has in a file; empty: there is none.
    secret_fingerprint: str = ""
    # How long it stays when nobody keeps it and nothing runs on it; 0: as long as its process.
    orphan_s: float = 0.0


class WorkerHost:
    """See the module. `service` makes the pool's servicer, `place` is asked where the settings name no host.

    retire: ends the process for good. make_engine: of a process that is this worker's alone.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        service: ServiceFactory,
        place: Callable[[], NodePlace] = lambda: NodePlace("127.0.0.1", 1),
        retire: Callable[[], None] = lambda: os._exit(0),
        make_engine: Callable[[EngineSettings, ClusterClock], Engine] | None = None,
    ) -> None:
        self._settings = settings
        self._service = service
        self._place = place
        self._retire = retire
        self._make_engine = make_engine or _vllm_engine
        self._is_orphan = False
        self._versions = versions.installed()
        self._record = wire.WorkerRegistration(
            worker_id=settings.worker_id,
            pool=_POOLS[settings.engine.role],
            state=wire.WORKER_STATE_STARTING,
            pid=os.getpid(),
            node=NODE,
            phase="starting",
            versions=to_wire(self._versions, wire.Versions),
        )
        self._clock = ClusterClock()
        self._ready = threading.Event()
        self._failure: str | None = None
        self._ends_process = False
        self._loop = asyncio.new_event_loop()
        self._end_asked = asyncio.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start_in_background(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> wire.WorkerRegistration:
        """Blocks until the worker serves. Raises StartError when it failed or takes longer."""
        if not self._ready.wait(timeout_s):
            raise StartError(f"worker {self._settings.worker_id} is still {self._record.phase} after {timeout_s:g} s")
        if self._failure is not None:
            raise StartError(f"worker {self._settings.worker_id}: {self._failure}")
        if self._stopped.is_set():
            raise StartError(f"worker {self._settings.worker_id} has been stopped")
        return self._record

    def stop(self, timeout_s: float) -> bool:
        """Stops serving, then the engine; True when it all ended in time."""
        self._stopped.set()
        self._loop.call_soon_threadsafe(self._end_asked.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_on_sigterm(self) -> None:
        """The process drains when it is asked to end, and ends then; asked once more it does not wait for what runs.

        To be called on the main thread. One that does not serve yet ends at once.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        if not self._ready.is_set() or self._failure is not None:
            os._exit(0)
        if self._ends_process:
            self._stopped.set()
        self._ends_process = True
        self._loop.call_soon_threadsafe(self._end_asked.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            if self._is_orphan:
                logger.warning("%s ends: nobody has kept it for too long", self._settings.worker_id)
                self._retire()
            if self._ends_process:
                os._exit(0)
        except Exception as error:  # noqa: BLE001 - top of the worker's thread: its failure is the worker's answer
            self._failure = str(error) or type(error).__name__
            logger.error("worker %s failed: %s", self._settings.worker_id, self._failure)
            self._ready.set()
            # Long enough for those that wait to learn the reason; then Ray starts the worker again.
            if self._ends_process or not self._stopped.wait(FAILURE_LINGER_S):
                os._exit(START_FAILED_EXIT_CODE)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        async with AsyncExitStack() as ends:
            await self._serve_until_stopped(ends)

    async def _serve_until_stopped(self, ends: AsyncExitStack) -> None:
        """What is to be ended goes to `ends`, which ends all of it, the last first, even where one of them fails."""
        settings = self._settings
        own_node.check(self._versions, settings.versions, settings.engine.model.path)
        secret = own_node.secret(settings.engine.secret_file, settings.secret_fingerprint)
        host = own_node.listening_address(settings.engine, self._place)
        engine_settings = replace(settings.engine, service_id=settings.service_id, host=host)
        engine = self._make_engine(engine_settings, self._clock)
        ends.push_async_callback(engine.stop)
        lease_s = settings.redis_lease_s
        place = RegistryPlace(
            lambda: connect(settings.redis_url, lease_s),
            settings.service_id,
            lease_s,
            settings.engine.index,
            settings.stall_timeout_s,
            secret,
        )
        ports = _ProcessPorts(replace(settings, engine=engine_settings), self._service, self._record, engine, secret)
        servicer = await WorkerStart(place, self._record, self._clock, ports).bring_up(ends)
        self._ready.set()
        await self._until_end_asked(servicer)
        if not self._stopped.is_set():
            await self._drained(servicer)
        await ports.server.stop(grace_s=0.5)

    async def _until_end_asked(self, servicer: WorkerServiceBase) -> None:
        settings = self._settings
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(self._end_asked.wait())]
        if settings.orphan_s:
            keeper = Keeper(
                connect(settings.redis_url, settings.redis_lease_s), settings.service_id, settings.redis_url
            )
            watching = asyncio.create_task(until_orphaned(keeper, settings.orphan_s, servicer.work_seen))
            watching.add_done_callback(self._orphaned)
            ends.append(watching)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    def _orphaned(self, watching: "asyncio.Task[None]") -> None:
        self._is_orphan = not watching.cancelled() and watching.exception() is None

    async def _drained(self, servicer: WorkerServiceBase) -> None:
        """Until nothing runs any more, `stop` is called, or it has taken as long as it may."""
        settings = self._settings
        self._record.phase = "draining: its process was asked to end"
        idle_polls = 0
        try:
            async with asyncio.timeout(settings.drain_timeout_s):
                while not self._stopped.is_set() and idle_polls < _IDLE_POLLS:
                    # It does not take requests again, even where somebody says so now.
                    if self._record.state != wire.WORKER_STATE_DRAINING:
                        servicer.start_draining(settings.session_grace_s)
                    await asyncio.sleep(_DRAIN_POLL_S)
                    idle_polls = idle_polls + 1 if servicer.is_idle() else 0
        except TimeoutError:
            logger.warning("%s leaves with work unfinished after %g s", settings.worker_id, settings.drain_timeout_s)


def _vllm_engine(settings: EngineSettings, clock: ClusterClock) -> Engine:
    """vLLM reads the environment while it is imported."""
    own_node.set_environment(engine_environment(settings))
    from worker_runtime.engine_process import EngineProcess
    from worker_runtime.vllm_engine import VllmEngine

    return VllmEngine(settings, clock, core=EngineProcess(settings, clock) if settings.engine.own_process else None)


class _ProcessPorts:
    """See `worker_start.WorkerPorts`: a worker that has a process of its own."""

    def __init__(
        self,
        settings: WorkerSettings,
        service: ServiceFactory,
        record: wire.WorkerRegistration,
        engine: Engine,
        secret: Secret | None,
    ) -> None:
        self.make_service = service
        # Once it is made.
        self.server: WorkerServer
        self._settings = settings
        self._record = record
        self._engine = engine
        self._secret = secret

    async def take_generation(self, registration: Registration) -> int:
        try:
            return await registration.open()
        except REDIS_DOWN as error:
            place = masked(self._settings.redis_url)
            raise StartError(f"the Redis at {place} {complaint(error)} when node {NODE} asks") from None

    def make_engine(self, generation: int) -> Engine:
        return self._engine

    async def start_engine(self, engine: Engine, registration: Registration) -> EngineInfo:
        loop, timeout_s = asyncio.get_running_loop(), self._settings.start_timeout_s

        def on_phase(phase: str) -> None:
            self._record.phase = phase
            loop.call_soon_threadsafe(registration.changed)

        try:
            async with asyncio.timeout(timeout_s):
                return await engine.start(on_phase, self.give_up)
        except TimeoutError:
            # Into the worker's log: where each thread stands is all there is to know of a start that hangs.
            faulthandler.dump_traceback()
            raise StartError(f"still {self._record.phase} after {timeout_s:g} s") from None

    def make_server(self) -> WorkerServer:
        engine = self._settings.engine
        self.server = WorkerServer(
            self._record, self._settings.max_message_bytes, engine.host, engine.ports, self._secret
        )
        return self.server

    async def with_retries(self, write: Callable[[], Awaitable[None]]) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(REDIS_DOWN),
            stop=stop_after_delay(self._settings.start_timeout_s),
            wait=wait_fixed(_RETRY_S),
            reraise=True,
        ):
            with attempt:
                await write()

    def give_up(self, why: str) -> None:
        """A worker without an engine is of no use: its process ends, its clients see it at once."""
        logger.error("the engine of %s is lost: %s", self._settings.worker_id, why)
        # Into the worker's log: where each thread stands is all there is to know of an engine that hangs.
        faulthandler.dump_traceback()
        os._exit(ENGINE_DIED_EXIT_CODE)
