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
        # One that was interrupted in `anext` may be there for a moment still.
        turn = asyncio.Lock()
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


async def _next_of(items: AsyncGenerator[T, None], turn: asyncio.Lock) -> T | object:
    async with turn:
        return await anext(items, _END)


async def _close(items: AsyncGenerator[T, None], turn: asyncio.Lock) -> None:
    async with turn:
        await items.aclose()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
