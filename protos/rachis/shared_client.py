"""One client for an object that is used from any event loop, and from none: what the adapters of frameworks hold."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

from rachis.client import AsyncClient
from rachis.loop_thread import LoopThread

T = TypeVar("T")


class SharedClient:
    """`here` is the client of the loop that runs; `wait` and `each` run what they are given in a loop of its own."""

    def __init__(self, address: str, **options: Any) -> None:
        self._address = address
        self._options = options
        self._clients: dict[asyncio.AbstractEventLoop, AsyncClient] = {}
        self._thread: LoopThread | None = None

    def here(self) -> AsyncClient:
        """Raises InvalidInputError, naming `address`."""
        loop = asyncio.get_running_loop()
        # A client holds its loop, so that nothing else would let go of those that have ended.
        # Loops of other threads come and go meanwhile.
        for each in list(self._clients):
            if each.is_closed():
                self._clients.pop(each, None)
        if loop not in self._clients:
            self._clients[loop] = AsyncClient(self._address, **self._options)
        return self._clients[loop]

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._own_loop().wait(coroutine)

    def each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        return self._own_loop().each(items)

    def _own_loop(self) -> LoopThread:
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread
