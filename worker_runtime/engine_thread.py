"""The thread that owns one engine: brings it up, carries out commands between two steps, steps, and notices its death.

    the engine and its `EngineWork`    this thread's alone, but for `work.figures.status`, a snapshot that anybody reads
    commands                           anybody puts them, this thread takes them
    futures, streams, callbacks        the asyncio loop's; this thread has the loop call what changes them

An engine that raises in a step is dead: every job fails with UnavailableError and `on_death` is called, so that the
worker's process can end and be started again. Commands are answered even then, until the thread is stopped.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cluster_core.engine_reports import EngineInfo, EngineStatus, PrefixClaimChange
from cluster_core.errors import StartError
from cluster_core.heartbeat import Heartbeat
from worker_runtime.engine_commands import JOB_COMMANDS, QUESTIONS
from worker_runtime.engine_work import EngineWork
from worker_runtime.job_stream import JobStream

logger = logging.getLogger(__name__)

# A thread that hangs inside vLLM does not keep its process from ending.
_STOP_TIMEOUT_S = 20.0

_NOTHING = EngineStatus()
_Found = TypeVar("_Found")
Command = Callable[[EngineWork], None]


# Makes an engine that is ready to step, on the thread. Its arguments: `on_phase`, which hears what it is doing, and
# `on_loop`, which has the asyncio loop call something soon (`call_soon_threadsafe`).
BringUp = Callable[[Callable[[str], None], Callable[..., object]], EngineWork]


@dataclass(frozen=True, slots=True)
class Reports:
    """What the thread tells, and how; all but `on_loop` may be called on the thread itself.

    on_loop: has whoever owns jobs call something soon. up, failed: what came of bringing the engine up.
    """

    on_loop: Callable[..., object]
    up: Callable[[EngineInfo], object]
    failed: Callable[[StartError], object]
    phase: Callable[[str], None]
    death: Callable[[str], None]


class EngineThread:
    """See `engine_commands.EngineCoreClient`."""

    def __init__(self, bring_up: BringUp) -> None:
        self._bring_up = bring_up
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.heartbeat = Heartbeat()
        # None before the engine is up.
        self.work: EngineWork | None = None

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        """Raises StartError where the engine does not come up."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        reports = Reports(
            loop.call_soon_threadsafe,
            up=lambda info: loop.call_soon_threadsafe(_settle, ready, info),
            failed=lambda error: loop.call_soon_threadsafe(ready.set_exception, error),
            phase=on_phase,
            death=on_death,
        )
        self._thread = threading.Thread(target=self.run, args=(reports,), name="engine", daemon=True)
        self._thread.start()
        return await ready

    def put(self, command: Command) -> None:
        """To be carried out between two steps, in order. May be called before `start`."""
        self._commands.put(command)

    async def answer(self, question: Callable[[EngineWork], _Found], *, unless_left: bool = False) -> _Found:
        """What `question` returns on the thread. unless_left: it is not asked where the caller has left meanwhile."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[_Found] = loop.create_future()

        def command(work: EngineWork) -> None:
            if not (unless_left and found.cancelled()):
                loop.call_soon_threadsafe(_settle, found, question(work))

        self._commands.put(command)
        return await found

    def tell(self, command: str, stream: JobStream, *arguments: Any) -> None:
        self.put(lambda work: JOB_COMMANDS[command](work.jobs, stream, *arguments))

    async def ask(
        self,
        question: str,
        *arguments: Any,
        unless_left: bool = False,
        on_place: Callable[[], None] = lambda: None,
    ) -> Any:
        loop = asyncio.get_running_loop()

        def asked(work: EngineWork) -> Any:
            found = QUESTIONS[question].ask(work, *arguments)
            loop.call_soon_threadsafe(on_place)
            return found

        return await self.answer(asked, unless_left=unless_left)

    def order(self, question: str, *arguments: Any) -> None:
        self.put(lambda work: QUESTIONS[question].ask(work, *arguments))

    def follow(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self.put(lambda work: work.claims.follow(on_change))

    def status(self) -> EngineStatus:
        status, stalled_s = self.published, self.heartbeat.stalled_s
        return replace(status, load=replace(status.load, stalled_s=stalled_s)) if stalled_s else status

    @property
    def published(self) -> EngineStatus:
        """As the last step has left it; the same object until there is another one."""
        return self.work.figures.status if self.work is not None else _NOTHING

    def ask_to_stop(self) -> None:
        self._stopping = True
        # Wakes the thread.
        self._commands.put(None)

    async def stop(self) -> None:
        self.ask_to_stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    # Everything below runs on the thread.

    def run(self, reports: Reports) -> None:
        """Brings the engine up and turns until it is stopped; the calling thread is the engine's."""
        try:
            work = self._bring_up(reports.phase, reports.on_loop)
        except Exception as error:
            # Whatever vLLM raises while starting is one fault: it did not start.
            logger.exception("the engine did not start")
            reports.failed(StartError(f"the engine did not start: {type(error).__name__}: {error}"))
            return
        self.work = work
        reports.up(work.info)
        try:
            self._keep_turning(work, reports.death)
        finally:
            work.shut_down()

    def _keep_turning(self, work: EngineWork, on_death: Callable[[str], None]) -> None:
        """Turns until it is stopped. After the engine's death it still answers: that the engine is dead."""
        try:
            while not self._stopping:
                self._turn(work)
        except Exception as error:
            # Top of the thread's loop: an engine that raised cannot go on.
            logger.exception("the engine died in a step")
            work.die(f"{type(error).__name__}: {error}")
            on_death(f"{type(error).__name__}: {error}")
        else:
            work.die("it was stopped")
        while not self._stopping:
            self._carry_out(work, block=True)
        self._carry_out(work, block=False)

    def _turn(self, work: EngineWork) -> None:
        """The commands that have come, then one engine step."""
        if not self._commands.empty() or not work.has_requests():
            self._carry_out(work, block=not work.has_requests())
        if not work.has_requests():
            work.publish_status()
            return
        with self.heartbeat.step():
            work.step()
        self.heartbeat.copies(work.copying_since_s())
        nap_s = work.nap_s()
        if nap_s:
            self._carry_out(work, block=True, timeout_s=nap_s)

    def _carry_out(self, work: EngineWork, *, block: bool, timeout_s: float | None = None) -> None:
        try:
            command = self._commands.get(block, timeout_s)
            while True:
                if command is not None:
                    with self.heartbeat.command():
                        command(work)
                command = self._commands.get_nowait()
        except queue.Empty:
            # What was taken in may leave nothing to compute: no step would report it.
            work.jobs.report_progress()


def _settle(future: "asyncio.Future[_Found]", value: _Found) -> None:
    if not future.cancelled():
        future.set_result(value)
