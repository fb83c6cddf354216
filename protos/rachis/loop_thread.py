"""An event loop in a thread of its own, for callers that wait."""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar, cast

from rachis.errors import FORKED, ClosedError

T = TypeVar("T")
_END = object()
# What goes on for longer though it was cancelled is left behind.
_END_S = 10.0


class LoopThread:
    """An event loop in a thread of its own, until it is closed, nobody has it any more, or the process ends."""

    def __init__(self) -> None:
        self._running = _Running()
        # A process that ends waits for nobody in there, and what is collected ends what it has begun.
        weakref.finalize(self, self._running.end)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises; ClosedError where the loop ends meanwhile, or has, or is from before a fork.
        Interrupted, for example by Ctrl-C, it cancels the coroutine. RuntimeError in the loop's own thread, which would
        wait for itself."""
        if self._running.is_here:
            coroutine.close()
            raise RuntimeError("the client's own thread cannot wait for it")
        future = self._running.give(coroutine)
        try:
            return future.result()
        except CancelledError:
            if self.closed:
                raise ClosedError from None
            raise
        except BaseException:
            future.cancel()
            raise

    def each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Ended early, it closes what it is given."""
        turn = _Turn()
        try:
            while (item := self.wait(_next_of(items, turn))) is not _END:
                yield cast("T", item)
        finally:
            self.leave(_close(items, turn))

    def leave(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs what ends something, and waits for it; where the loop is closed there is nothing to end. In the loop's
        own thread, where the collector has come to it, nobody waits."""
        if self._running.is_here:
            self._running.keep(coroutine)
            return
        with suppress(ClosedError):
            self.wait(coroutine)

    @property
    def closed(self) -> bool:
        return self._running.is_ended

    def close(self, last: Coroutine[Any, Any, Any] | None = None) -> None:
        """Once nothing runs there that anybody waits for; a second time it does nothing. last: to be run before that,
        when nothing new is taken."""
        self._running.end(last)
        self._running.join()


class _Running:
    """The loop and its thread, which know nothing of who has them."""

    def __init__(self) -> None:
        self.is_ended = False
        self._loop = asyncio.new_event_loop()
        # The collector may run in whoever holds it, and come to an iterator that takes it again.
        self._lock = threading.RLock()
        self._kept: set[asyncio.Task[Any]] = set()
        self._process = os.getpid()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="rachis-client", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return threading.current_thread() is self._thread

    def give(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Raises ClosedError."""
        if self._is_forked:
            coroutine.close()
            raise ClosedError(FORKED)
        with self._lock:
            if self.is_ended:
                coroutine.close()
                raise ClosedError
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def keep(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Of its own thread: nobody waits for it."""
        if self._loop.is_closed():
            coroutine.close()
            return
        task = self._loop.create_task(coroutine)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    def end(self, last: Coroutine[Any, Any, Any] | None = None) -> None:
        """See `LoopThread.close`; it waits for `last`, not for the thread, and in that thread for nothing. One that was
        forked has no thread to end."""
        if self._is_forked:
            _given_up(last)
            return
        with self._lock:
            if self.is_ended:
                _given_up(last)
                return
            self.is_ended = True
            future = asyncio.run_coroutine_threadsafe(self._stop(last), self._loop)
        if last is not None and not self.is_here:
            future.result()

    async def _stop(self, last: Coroutine[Any, Any, Any] | None) -> None:
        try:
            if last is not None:
                await last
        finally:
            self._loop.stop()

    def join(self) -> None:
        if not self.is_here and not self._is_forked:
            self._thread.join()

    @property
    def _is_forked(self) -> bool:
        """Its thread is in another process, and what held the lock there at the fork does not give it back here."""
        return os.getpid() != self._process


def _given_up(coroutine: Coroutine[Any, Any, Any] | None) -> None:
    if coroutine is not None:
        coroutine.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        # What it was given until then is cancelled, so that nobody waits for it.
        loop.run_until_complete(_cancel_others())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class _Turn:
    """Of one iterator, in the loop's thread: who is in it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.task: asyncio.Task[Any] | None = None


async def _next_of(items: AsyncGenerator[T, None], turn: _Turn) -> T | object:
    turn.task = asyncio.current_task()
    async with turn.lock:
        return await anext(items, _END)


async def _close(items: AsyncGenerator[T, None], turn: _Turn) -> None:
    # An interrupt that came just when it was asked for the next item has cancelled nothing: nobody had it in hand yet.
    if turn.task is not None:
        turn.task.cancel()
    async with turn.lock:
        await items.aclose()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_END_S)
