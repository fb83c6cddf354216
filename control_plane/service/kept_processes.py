"""Processes of one command that are started again whenever they end, until whoever keeps them stops."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cluster_core.background import BackgroundTasks
from cluster_core.bound_child import bind_to_parent
from cluster_core.clock import monotonic_s
from cluster_core.errors import StartError
from control_plane.service import child_process

logger = logging.getLogger(__name__)

_MOST_LOG_BYTES = 16 << 20
# As a shell says of a command that it cannot run.
_NOT_STARTED = 126


@dataclass(frozen=True, slots=True)
class Pauses:
    """Before one that has ended is started again: later each time, until one has lived for long enough."""

    first_s: float = 1.0
    longest_s: float = 30.0
    lived_s: float = 60.0


PAUSES = Pauses()


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept. what: one of them is, in a sentence. command: of the one with this number. said: on its standard
    input, where a password is no argument that all users see. log: of what it writes to standard error; where none is
    given, that is this process's own. environment: None: this process's own."""

    what: str
    count: int
    command: Callable[[int], Sequence[str]]
    said: str = ""
    log: Callable[[int], Path] | None = None
    environment: Mapping[str, str] | None = None


class KeptProcesses:
    """`start`, then `first_up` or `all_up`, then `stop`. Each says `{"event": "listening", ...}` once it is up."""

    def __init__(
        self,
        kept: Kept,
        pauses: Pauses = PAUSES,
        on_change: Callable[[int, Mapping[str, Any]], None] = lambda number, event: None,
    ) -> None:
        """on_change: hears of the one with this number that it listens, as it says it, or has `ended`."""
        self._kept = kept
        self._on_change = on_change
        # What the last one that did not come up has said of it.
        self._error = ""
        self._pauses = pauses
        self._up = [asyncio.Event() for _ in range(kept.count)]
        self._ended_early = asyncio.Event()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._background = BackgroundTasks()
        # How often one was started, and what each said when it was up last.
        self.starts = 0
        self.listening: dict[int, Mapping[str, Any]] = {}

    def start(self) -> None:
        for number in range(self._kept.count):
            self._background.start(self._keep(number))

    async def first_up(self) -> Mapping[str, Any]:
        """What one of them said last, once one listens: who waits bounds the wait."""
        await _first(*(up.wait() for up in self._up))
        return next(iter(self.listening.values()))

    async def all_up(self, *, at_once: bool = False) -> None:
        """Once each of them has listened. at_once: raises StartError where one ends before it has."""
        for up in self._up:
            if at_once:
                await _first(up.wait(), self._ended_early.wait())
                if not up.is_set():
                    why = f": {self._error}" if self._error else ", and did not say why"
                    raise StartError(f"a {self._kept.what} did not come up{why}")
            else:
                await up.wait()

    @property
    def pids(self) -> list[int]:
        """By number."""
        return [process.pid for _, process in sorted(self._processes.items())]

    async def stop(self, timeout_s: float) -> None:
        """Asks all to end, and ends those that have not in that time."""
        await self._background.cancel()
        await asyncio.gather(*(child_process.end(each, timeout_s) for each in self._processes.values()))

    async def _keep(self, number: int) -> None:
        pauses = self._pauses
        pause_s = pauses.first_s
        while True:
            began_s = monotonic_s()
            try:
                status = await self._run(number)
            except OSError as error:
                logger.warning("%s %d cannot be started: %s", self._kept.what, number, error)
                status = _NOT_STARTED
            self._on_change(number, {"event": "ended", "status": status})
            if not self._up[number].is_set():
                self._ended_early.set()
            if monotonic_s() - began_s > pauses.lived_s:
                pause_s = pauses.first_s
            why = f", see {self._kept.log(number)}" if self._kept.log is not None else ""
            what = self._kept.what
            logger.warning("%s %d ended with %d%s; it is started again in %g s", what, number, status, why, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, pauses.longest_s)

    async def _run(self, number: int) -> int:
        """One start, to its end."""
        process = await self._started(number)
        self.starts += 1
        self._processes[number] = process
        assert process.stdout is not None and process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(self._kept.said.encode())
            await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            event = child_process.event(line)
            self._error = str(event.get("error", self._error))
            if event.get("event") == "listening":
                self.listening[number] = event
                self._on_change(number, event)
                self._up[number].set()
        return await process.wait()

    async def _started(self, number: int) -> asyncio.subprocess.Process:
        command, pipe = self._kept.command(number), asyncio.subprocess.PIPE
        log = _appended(self._kept.log(number)) if self._kept.log is not None else None
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=log, env=self._kept.environment,
                preexec_fn=bind_to_parent, start_new_session=True,
            )  # fmt: skip
        finally:
            if log is not None:
                log.close()


def _appended(file: Path) -> IO[bytes]:
    """Why one ended last is in front, or in the file before."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > _MOST_LOG_BYTES:
        file.replace(file.with_name(f"{file.name}.1"))
    return file.open("ab")


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them has ended; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
