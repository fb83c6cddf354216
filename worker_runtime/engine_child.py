"""One engine in a process of its own: the engine's side of `worker_runtime.engine_process`.

    python -m worker_runtime.engine_child

Its standard input is the socket. The main thread is the engine's, and is kept from nothing but its steps: one thread
takes messages in, another one packs and sends what the steps have made, while the device computes. It ends with its
socket, so at the latest with the worker; signals that ask a service's processes to end are the worker's to handle.
"""

import contextlib
import faulthandler
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from cluster_core import event_log
from cluster_core.bound_child import bind_to_parent
from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_jobs import EngineOutput, SessionProgress
from cluster_core.engine_reports import EngineStatus
from worker_runtime.engine_commands import JOB_COMMANDS, QUESTIONS
from worker_runtime.engine_messages import HEADER, Frame, Message, Start, encoded, of_item
from worker_runtime.engine_thread import BringUp, EngineThread, Reports
from worker_runtime.engine_work import EngineWork
from worker_runtime.job_stream import JobStream
from worker_runtime.vllm_start import bring_up_vllm

# At the latest after so long it says how the engine is, and that its process lives.
BEAT_S = 0.25
_OF_A_RECORD = ("name", "levelname", "levelno", "pathname", "filename", "lineno", "funcName", "created", "msecs")
# Of a step that has hung for so long it logs once where each thread stands.
_DUMP_S = 20.0


class Outbox:
    """What is to be sent. Written on any thread; what one call of the engine has made goes together."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()
        self._together: list[Message] | None = None

    def put(self, *message: Any) -> None:
        self._queue.put([message])

    def add(self, *message: Any) -> None:
        """On the engine's thread alone, within `together`."""
        assert self._together is not None
        self._together.append(message)

    def together(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function at once, on the engine's thread."""
        self._together = []
        try:
            function(*arguments)
        finally:
            made, self._together = self._together, None
            if made:
                self._queue.put(made)

    def take(self, timeout_s: float) -> list[Message]:
        """All that there is; waits for something so long."""
        taken: list[Message] = []
        try:
            taken += self._queue.get(timeout=timeout_s)
            while True:
                taken += self._queue.get_nowait()
        except queue.Empty:
            return taken


class _Items:
    """See `job_stream.Items`."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self._number = number
        self._outbox = outbox

    def put_nowait(self, item: EngineOutput | Exception, /) -> None:
        self._outbox.add("made", self._number, item)


class _Session:
    """See `job_stream.SessionReports`."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self._number = number
        self._outbox = outbox
        self.reported: SessionProgress | None = None

    def report(self, progress: SessionProgress) -> None:
        self._outbox.add("progress", self._number, progress)

    def fail(self, error: Exception) -> None:
        self._outbox.add("session_failed", self._number, error)


class _Logs(logging.Handler):
    """Sends what is logged to the worker, which knows what each request is called."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        told = {name: getattr(record, name) for name in _OF_A_RECORD}
        told |= {name: str(getattr(record, name)) for name in ("request_id", "trace_id") if hasattr(record, name)}
        told["msg"] = event_log.message_of(record)
        if record.exc_info:
            told["exc_text"] = logging.Formatter().formatException(record.exc_info)
        self._outbox.put("logged", logging.makeLogRecord(told))


class EngineChild:
    """channel: to the worker. bring_up: see `main`."""

    def __init__(self, channel: socket.socket, bring_up: Callable[..., EngineWork]) -> None:
        self._channel = channel
        self._bring_up = bring_up
        self._clock = ClusterClock()
        self._outbox = Outbox()
        self._streams: dict[int, JobStream] = {}
        self._left: set[int] = set()
        self._over = threading.Event()

    def run(self) -> None:
        """Until the worker ends it, or is gone."""
        # Never closed: the thread that reads holds its lock to the end.
        incoming = self._channel.makefile("rb")
        first = _messages(incoming)
        assert first is not None, "the worker has gone before it said what to start"
        ((_, start),) = first
        self._set_up_logs(start)
        made: BringUp = partial(self._bring_up, start.settings, self._clock)
        engine = EngineThread(made)
        sending = threading.Thread(target=_or_end, args=(self._send, engine), name="sends")
        sending.start()
        threading.Thread(target=_or_end, args=(self._take, incoming, engine), name="takes", daemon=True).start()
        put = self._outbox.put
        reports = Reports(
            self._outbox.together,
            up=lambda info: put("up", info),
            failed=lambda error: put("failed", error),
            phase=lambda phase: put("phase", phase),
            death=lambda why: put("died", why),
        )
        try:
            engine.run(reports)
        finally:
            self._over.set()
            sending.join()

    def _set_up_logs(self, start: Start) -> None:
        logs = _Logs(self._outbox)
        event_log.set_levels(start.level)
        logging.getLogger().addHandler(logs)
        # The engine's ranks, where they are forks, have no thread that sends.
        os.register_at_fork(after_in_child=lambda: self._leave_to_parent(logs))

    def _leave_to_parent(self, logs: logging.Handler) -> None:
        """In a fork: what it logs goes to standard error, and the socket ends with the engine alone."""
        logging.getLogger().removeHandler(logs)
        logging.getLogger().addHandler(logging.StreamHandler())
        os.close(self._channel.detach())

    def _take(self, incoming: BinaryIO, engine: EngineThread) -> None:
        while (messages := _messages(incoming)) is not None:
            for name, *arguments in messages:
                if name == "stop":
                    engine.ask_to_stop()
                else:
                    getattr(self, f"_take_{name}")(engine, *arguments)
        # The worker is gone, and all that anybody here works for.
        os._exit(0)

    def _take_clock(self, engine: EngineThread, ahead_s: float) -> None:
        now_s = monotonic_s()
        self._clock.measured(now_s + ahead_s, now_s, now_s)

    def _take_job(self, engine: EngineThread, command: str, number: int, *arguments: Any) -> None:
        engine.put(lambda work: self._carry_out(work, command, number, *arguments))

    def _take_ask(self, engine: EngineThread, number: int, question: str, *arguments: Any) -> None:
        """number: of the question; 0: nobody waits for the answer."""

        def answer(work: EngineWork) -> None:
            if number in self._left:
                self._left.discard(number)
                return
            found = QUESTIONS[question].ask(work, *arguments)
            if number:
                self._outbox.put("answer", number, found)

        engine.put(answer)

    def _take_left(self, engine: EngineThread, number: int) -> None:
        self._left.add(number)
        # Whatever was asked before this has been answered by then.
        engine.put(lambda work: self._left.discard(number))

    def _take_follow(self, engine: EngineThread, follower: int) -> None:
        engine.put(lambda work: work.claims.follow(partial(self._outbox.add, "claims", follower)))

    # On the engine's thread.

    def _carry_out(self, work: EngineWork, command: str, number: int, *arguments: Any) -> None:
        """A stream is kept until the worker has heard of its end: it may be abandoned until then."""
        match command:
            case "add" | "open":
                job, skip_chars, *arguments = arguments  # type: ignore[assignment]
                stream = JobStream(job, _Items(number, self._outbox), skip_chars=skip_chars)
                stream.session = _Session(number, self._outbox) if command == "open" else None
                self._streams[number] = stream
                JOB_COMMANDS[command](work.jobs, stream, *arguments)
            case "forget":
                self._streams.pop(number, None)
            case "abandon":
                JOB_COMMANDS[command](work.jobs, self._streams.pop(number))
            case _:
                JOB_COMMANDS[command](work.jobs, self._streams[number], *arguments)

    # On the thread that sends.

    def _send(self, engine: EngineThread) -> None:
        told: EngineStatus | None = None
        was_stalled_s = 0.0
        with contextlib.suppress(OSError):
            while True:
                is_over = self._over.is_set()
                messages = self._outbox.take(0.0 if is_over else BEAT_S)
                if is_over and not messages:
                    return
                status, stalled_s = engine.published, engine.heartbeat.stalled_s
                made = [of_item(*rest) if name == "made" else (name, *rest) for name, *rest in messages]
                self._channel.sendall(encoded(Frame(made, status if status is not told else None, stalled_s)))
                if was_stalled_s < _DUMP_S <= stalled_s:
                    faulthandler.dump_traceback()
                told, was_stalled_s = status, stalled_s


def _or_end(work: Callable[..., None], *arguments: Any) -> None:
    """On a thread. An engine that can say or hear nothing any more is of no use: its process ends, and says why."""
    try:
        work(*arguments)
    except Exception:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        os._exit(1)


def _messages(incoming: BinaryIO) -> list[Message] | None:
    """None: the other end is gone."""
    with contextlib.suppress(OSError):
        header = incoming.read(HEADER.size)
        if len(header) == HEADER.size:
            (size,) = HEADER.unpack(header)
            text = incoming.read(size)
            if len(text) == size:
                messages: list[Message] = pickle.loads(text)
                return messages
    return None


def main(bring_up: Callable[..., EngineWork] = bring_up_vllm) -> None:
    """bring_up: makes the engine by its settings, a clock, and what `engine_thread.BringUp` gets."""
    bind_to_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not ignored: programs that it starts would ignore them, too.
        signal.signal(number, lambda *_: None)
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        EngineChild(channel, bring_up).run()
    except Exception:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        os._exit(1)
    finally:
        sys.stdout.flush()
    # Nothing is left to do, and what libraries do at a process's end may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
