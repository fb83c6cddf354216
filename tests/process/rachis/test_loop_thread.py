"""An iterator over a loop in another thread, interrupted where an interrupt is hardest to take."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import pytest
from rachis.loop_thread import LoopThread

T = TypeVar("T")


class InterruptedLoop(LoopThread):
    """Ctrl-C comes when the loop has been given what is to be waited for, and before anybody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.comes_now = False

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.comes_now:
            self.comes_now = False
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            raise KeyboardInterrupt
        return super().wait(coroutine)


@pytest.mark.timeout(60)
def test_an_interrupt_before_anybody_waits_ends_the_iterator() -> None:
    """It has cancelled nothing: the item that never comes would be waited for by whoever closes the iterator."""
    closed = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    loop = InterruptedLoop()
    found = []
    with pytest.raises(KeyboardInterrupt):
        for item in loop.each(items()):
            found.append(item)
            loop.comes_now = True
    loop.close()
    assert (found, closed) == ([1], [True])


def test_an_iterator_that_ends_by_itself_gives_everything() -> None:
    async def items() -> AsyncGenerator[int, None]:
        for number in range(3):
            yield number

    loop = LoopThread()
    assert list(loop.each(items())) == [0, 1, 2]
    loop.close()
