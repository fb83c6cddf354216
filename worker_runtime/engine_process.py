"""Runs one engine in a process of its own: the worker's side, on the asyncio loop.

Serving then never holds the interpreter lock of a step: gRPC, the router's calls and claims are this process's, the
engine's process has a thread that steps and two that pack and unpack (`worker_runtime.engine_child`). All that a step
has made comes in one message (`worker_runtime.engine_messages`).

Who lives how long: the engine's process ends with its socket, so at the latest with this one. Where it ends by itself,
all its jobs fail and `on_death` is called, as for an engine that raised in a step.
"""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_jobs import EngineOutput, SessionProgress
from cluster_core.engine_reports import EngineInfo, EngineStatus, PrefixClaimChange
from cluster_core.errors import StartError, UnavailableError
from cluster_core.heartbeat import FIRST_S
from worker_runtime.engine_commands import QUESTIONS
from worker_runtime.engine_messages import HEADER, Frame, Start, encoded
from worker_runtime.engine_settings import EngineSettings
from worker_runtime.job_stream import JobStream
from worker_runtime.preloaded_python import engine_python

logger = logging.getLogger(__name__)

_MODULE = "worker_runtime.engine_child"
_STOP_TIMEOUT_S = 20.0
# It tells how it is several times a second. One that has said nothing for so long hangs, or was stopped.
_SILENT_S = FIRST_S
# What a process had said before it ended is there at once, unless somebody else holds its end of the socket.
_LAST_WORDS_S = 1.0
_READ_BYTES = 1 << 20


class EngineProcess:
    """See `engine_commands.EngineCoreClient`. clock: of the deadlines of pulls. module: what the process runs."""

    def __init__(self, settings: EngineSettings, clock: ClusterClock, module: str = _MODULE) -> None:
        self._settings = settings
        self._clock = clock
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        # What is to be sent, also before there is anybody to send it to; and all that is done for the process.
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._living: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._on_phase: Callable[[str], None] = lambda phase: None
        self._on_death: Callable[[str], None] = lambda why: None
        self._on_change: Callable[[PrefixClaimChange], None] = lambda change: None
        self._followers = 0
        # Jobs that have not made their last output, both ways.
        self._streams: dict[int, JobStream] = {}
        self._numbers: dict[JobStream, int] = {}
        # Questions that wait for their answers: the name, the future, and what is called at its place.
        self._asked: dict[int, tuple[str, asyncio.Future[Any], Callable[[], None]]] = {}
        self._last_number = 0
        self._status = EngineStatus()
        self._stalled_s = 0.0
        self._heard_s: float | None = None
        self._stopping = False
        self._is_up = False
        self._has_died = False
        # Why it cannot be asked any more.
        self._dead: str | None = None

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        self._on_phase, self._on_death = on_phase, on_death
        if self._dead is not None:
            raise StartError(f"the engine did not start: {self._dead}")
        self._ready = asyncio.get_running_loop().create_future()
        level = logging.getLogger(__package__).getEffectiveLevel()
        first = encoded([("start", Start(self._settings, level))])
        own, its = socket.socketpair()
        own.setblocking(False)
        with its:
            # Nothing else is served before the engine is up.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [*engine_python(), "-m", self._module], stdin=its.fileno()
            )
        self._living = asyncio.create_task(self._live(own, first, self._process))
        return await self._ready

    def tell(self, command: str, stream: JobStream, *arguments: Any) -> None:
        match command:
            case "add" | "open" if self._dead is not None:
                _fail(stream, self._death())
            case "add" | "open":
                self._last_number += 1
                self._streams[self._last_number], self._numbers[stream] = stream, self._last_number
                self._send("job", command, self._last_number, stream.job, stream.skip_chars, *arguments)
            case "abandon" if stream.ended:
                # It may have left a lease.
                stream.ended = False
                self.order("release", stream.job.request_id)
            case _ if stream in self._numbers:
                self._send("job", command, self._numbers[stream], *arguments)
                if command == "abandon":
                    self._forget(self._numbers[stream])

    async def ask(
        self,
        question: str,
        *arguments: Any,
        unless_left: bool = False,
        on_place: Callable[[], None] = lambda: None,
    ) -> Any:
        if self._dead is not None:
            on_place()
            return QUESTIONS[question].dead(self._dead)
        self._last_number += 1
        number, found = self._last_number, asyncio.get_running_loop().create_future()
        self._asked[number] = question, found, on_place
        self._send("ask", number, question, *arguments)
        try:
            return await found
        finally:
            if self._asked.pop(number, None) is not None and unless_left:
                self._send("left", number)

    def order(self, question: str, *arguments: Any) -> None:
        self._send("ask", 0, question, *arguments)

    def follow(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._on_change = on_change
        self._followers += 1
        self._send("follow", self._followers)

    def status(self) -> EngineStatus:
        status = self._status
        if self._dead is not None or self._heard_s is None:
            return status
        silent_s = monotonic_s() - self._heard_s
        stalled_s = max(self._stalled_s, silent_s if silent_s > _SILENT_S else 0.0)
        return replace(status, load=replace(status.load, stalled_s=stalled_s)) if stalled_s else status

    async def stop(self) -> None:
        self._stopping = True
        self._send("stop")
        if self._process is not None and self._living is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await asyncio.shield(self._living)
            self._process.kill()
            await self._living
        self._lost("it was stopped")

    def _send(self, *message: Any) -> None:
        """With the time of the service first: leases end by it."""
        if self._dead is None:
            self._outgoing.put_nowait(encoded([("clock", self._clock.unix_s() - monotonic_s()), message]))

    async def _live(self, own: socket.socket, first: bytes, process: "subprocess.Popen[bytes]") -> None:
        """As long as the process does, or its socket."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        watched = os.pidfd_open(process.pid)
        loop.add_reader(watched, ended.set)
        tasks = [asyncio.create_task(self._write(own, first)), asyncio.create_task(self._read(own))]
        ends = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({tasks[1], ends}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({tasks[1]}, timeout=_LAST_WORDS_S)
        finally:
            loop.remove_reader(watched)
            os.close(watched)
            for task in (*tasks, ends):
                task.cancel()
            await asyncio.gather(*tasks, ends, return_exceptions=True)
            own.close()
        code = await asyncio.to_thread(_exit_status, process)
        self._lost("it was stopped" if self._stopping else f"its process ended with {code}")

    async def _write(self, own: socket.socket, first: bytes) -> None:
        loop, frame = asyncio.get_running_loop(), first
        # Whoever reads notices that there is nobody any more.
        with suppress(OSError):
            while True:
                await loop.sock_sendall(own, frame)
                frame = await self._outgoing.get()

    async def _read(self, own: socket.socket) -> None:
        """All that it says, to its end."""
        loop, buffer = asyncio.get_running_loop(), bytearray()
        try:
            while data := await loop.sock_recv(own, _READ_BYTES):
                buffer += data
                for frame in _frames(buffer):
                    self._take(frame)
                # What is there already is received without waiting: others would have no turn.
                await asyncio.sleep(0)
        except OSError:
            logger.debug("the engine's process has gone")
        except Exception:
            # Nobody would hear of the engine any more.
            logger.exception("what the engine's process says cannot be read")

    def _take(self, frame: Frame) -> None:
        self._heard_s, self._stalled_s = monotonic_s(), frame.stalled_s
        # Before the messages: a caller that has a lease finds it in the status.
        self._status = frame.status or self._status
        for name, *arguments in frame.messages:
            _call(getattr(self, f"_on_{name}_message"), *arguments)

    def _lost(self, why: str) -> None:
        if self._dead is not None:
            return
        self._dead = why
        for stream in list(self._numbers):
            self._forget(self._numbers[stream])
            _fail(stream, self._death())
        asked, self._asked = self._asked, {}
        for question, found, on_place in asked.values():
            _call(on_place)
            _settle(found, QUESTIONS[question].dead(why))
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(StartError(f"the engine did not start: {why}"))
        elif self._is_up and not (self._stopping or self._has_died):
            self._on_death(why)

    def _death(self) -> UnavailableError:
        return UnavailableError(f"the engine died: {self._dead}")

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            del self._numbers[stream]

    # What it says, by name.

    def _on_phase_message(self, phase: str) -> None:
        self._on_phase(phase)

    def _on_up_message(self, info: EngineInfo) -> None:
        assert self._ready is not None
        self._is_up = True
        _settle(self._ready, info)

    def _on_failed_message(self, error: StartError) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(error)

    def _on_tokens_message(self, number: int, token_ids: tuple[int, ...], text: str) -> None:
        if number in self._streams:
            self._streams[number].items.put_nowait(EngineOutput(token_ids, text))

    def _on_item_message(self, number: int, item: EngineOutput | Exception) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        if isinstance(item, Exception) or item.is_last:
            self._forget(number)
            self._send("job", "forget", number)
            stream.ended = not isinstance(item, Exception)
        stream.items.put_nowait(item)

    def _on_progress_message(self, number: int, progress: SessionProgress) -> None:
        stream = self._streams.get(number)
        if stream is not None and stream.session is not None:
            stream.session.report(progress)

    def _on_session_failed_message(self, number: int, error: Exception) -> None:
        stream = self._streams.get(number)
        if stream is not None and stream.session is not None:
            stream.session.fail(error)

    def _on_answer_message(self, number: int, answer: Any) -> None:
        if number in self._asked:
            _, found, on_place = self._asked.pop(number)
            _call(on_place)
            _settle(found, answer)

    def _on_claims_message(self, follower: int, change: PrefixClaimChange) -> None:
        if follower == self._followers:
            self._on_change(change)

    def _on_died_message(self, why: str) -> None:
        """It answers still: that it is dead."""
        self._has_died = True
        self._on_death(why)

    def _on_logged_message(self, record: logging.LogRecord) -> None:
        its = logging.getLogger(record.name)
        if its.isEnabledFor(record.levelno):
            its.handle(record)


def _frames(buffer: bytearray) -> Iterator[Frame]:
    """Takes whole ones out of the buffer."""
    while len(buffer) >= HEADER.size:
        (size,) = HEADER.unpack_from(buffer)
        if len(buffer) < HEADER.size + size:
            return
        frame: Frame = pickle.loads(buffer[HEADER.size : HEADER.size + size])
        del buffer[: HEADER.size + size]
        yield frame


def _exit_status(process: "subprocess.Popen[bytes]") -> int:
    """One that has closed its socket and lives on is ended."""
    try:
        return process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _call(function: Callable[..., object], *arguments: Any) -> None:
    """What it raises is a defect of whoever asked to be called, and ends nothing else."""
    try:
        function(*arguments)
    except Exception:
        logger.exception("a caller of the engine failed")


def _fail(stream: JobStream, error: Exception) -> None:
    if stream.session is not None:
        stream.session.fail(error)
    stream.items.put_nowait(error)


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)
