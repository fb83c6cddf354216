"""An event loop in a thread of its own, for callers that wait."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar, cast

T = TypeVar("T")
_END = object()


class LoopThread:
    """An event loop in a thread of its own, to the end of the process or until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rachis-client", daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises. Interrupted, for example by Ctrl-C, it cancels the coroutine."""
        if self.closed:
            coroutine.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
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
            if not self.closed:
                self.wait(_close(items, turn))

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Once nothing runs there that anybody waits for."""
        self.wait(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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
    await asyncio.gather(*others, return_exceptions=True)
