"""Commands to an engine: each is carried out between two of its steps, in the order in which they came."""

import asyncio
from collections import deque
from collections.abc import Callable


class Commands:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._news = asyncio.Event()

    def add(self, command: Callable[[], object]) -> None:
        self._waiting.append(command)
        self.wake()

    def carry_out(self) -> None:
        """Those as well that come meanwhile."""
        while self._waiting:
            self._waiting.popleft()()

    def wake(self) -> None:
        """`news` returns: there is something to do."""
        self._news.set()

    async def news(self) -> None:
        """The next `add` or `wake`."""
        self._news.clear()
        await self._news.wait()
