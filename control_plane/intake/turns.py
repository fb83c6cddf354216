"""What comes or goes at once is spread over turns of the event loop, so that others have theirs in between.

A client that opens two hundred sessions in one moment, or drops its connection with as many on it, would hold the loop
up for as long as all of them take.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

MOST_A_TURN = 4

Result = TypeVar("Result")


class Turns:
    """most: calls that begin or end in one turn of the loop; the others do in the next ones, in order."""

    def __init__(self, most: int = MOST_A_TURN) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refill_is_due = False

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What the work returns or raises. It begins in its turn, and to be cancelled, it waits for one, too."""
        try:
            await self._turn()
        except BaseException:
            work.close()
            raise
        task = asyncio.create_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await self._end(task)
            raise
        finally:
            task.cancel()
            # What it failed of went through this frame.
            del task

    async def _end(self, task: asyncio.Task[Any]) -> None:
        """Returns when the task has ended, and not before, however often this is cancelled meanwhile."""
        if not task.done():
            with suppress(asyncio.CancelledError):
                await self._turn()
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        # Nobody is there for what it raised.
        _ = task.cancelled() or task.exception()

    async def _turn(self) -> None:
        if not self._refill_is_due:
            self._refill_is_due = True
            asyncio.get_running_loop().call_soon(self._refill)
        if self._left:
            self._left -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine

    def _refill(self) -> None:
        """In the next turn of the loop."""
        self._left = self._most
        while self._left and self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                self._left -= 1
        self._refill_is_due = bool(self._waiting)
        if self._refill_is_due:
            asyncio.get_running_loop().call_soon(self._refill)
