"""What a session's client has still to take of its answer: bounded, with an end that is told to whoever asks."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class AnswerQueue(Generic[Item]):
    """One task puts and ends, others take."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[Item] = deque()
        self._has_ended = False
        self._changed = asyncio.Event()

    async def put(self, item: Item) -> None:
        """Waits while it is full."""
        while len(self._items) >= self._most:
            await self._change()
        self._items.append(item)
        self._changed.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()

    async def take(self) -> Item | None:
        """None at the end, each time."""
        while not self._items and not self._has_ended:
            await self._change()
        item = self._items.popleft() if self._items else None
        self._changed.set()
        return item

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
