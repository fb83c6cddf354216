"""Answers that go on: what a call tells on the router's loop, handed to the thread that writes it to a browser.

Nothing on the loop waits for a browser. What it has not taken lies in a queue of a few messages; where that is full the
call is ended, and so is the stream. So many are open at a time and no more.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from google.protobuf.message import Message

from control_plane.console.admin_calls import Refused

MOST_STREAMS = 16
# Messages that a browser is behind.
MOST_BEHIND = 8

Told = Message | Refused | None


@dataclass(slots=True)
class StreamCounts:
    """Since the router started, `open` aside. Written under a lock, read by anybody."""

    open: int = 0
    # Ended because the browser did not read; not begun because there were too many.
    slow: int = 0
    refused: int = 0


class TooManyStreamsError(Exception):
    """As many are open as may be."""


class Streams:
    """Of one router. `close` ends all that are open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int = MOST_STREAMS) -> None:
        self._loop = loop
        self._most = most
        self._lock = threading.Lock()
        self._pumps: set[Future[None]] = set()
        self.counts = StreamCounts()

    def close(self) -> None:
        with self._lock:
            for pump in self._pumps:
                pump.cancel()

    @contextmanager
    def opened(self, answers: AsyncGenerator[Message, None]) -> Iterator["Stream"]:
        """For a thread other than the loop's. Raises TooManyStreamsError."""
        with self._lock:
            if self.counts.open >= self._most:
                self.counts.refused += 1
                raise TooManyStreamsError
            self.counts.open += 1
        stream = Stream()
        pump = asyncio.run_coroutine_threadsafe(stream.pump(answers), self._loop)
        with self._lock:
            self._pumps.add(pump)
        try:
            yield stream
        finally:
            pump.cancel()
            with self._lock:
                self._pumps.discard(pump)
                self.counts.open -= 1
                self.counts.slow += stream.is_slow


class Stream:
    """One answer on its way to a browser."""

    def __init__(self) -> None:
        self._told: queue.Queue[Told] = queue.Queue(MOST_BEHIND)
        # The browser does not keep up.
        self.is_slow = False

    async def pump(self, answers: AsyncGenerator[Message, None]) -> None:
        """On the loop: never waits for the reader."""
        try:
            async with aclosing(answers) as messages:
                async for message in messages:
                    self._told.put_nowait(message)
            self._told.put_nowait(None)
        except Refused as refused:
            self._put_last(refused)
        except queue.Full:
            self.is_slow = True
        except asyncio.CancelledError:
            self._put_last(None)
            raise

    def next(self, timeout_s: float) -> Told:
        """For the thread that writes: the next message, why there is none, or None at the end. Raises queue.Empty when
        nothing has come for so long."""
        return self._told.get(timeout=timeout_s)

    def _put_last(self, told: Told) -> None:
        if not self._told.full():
            self._told.put_nowait(told)
