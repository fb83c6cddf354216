"""One call on its way: two lanes with bounded windows, and how each end learns that it is over.

Who ends a call: the server with its status, or the client by cancelling or its deadline, or the link by breaking. The
first that reaches an end counts there.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from fault_sim.network import Lane, Link

_NOTICED_WITHIN_S = 20.0

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


class Half:
    """One direction of a call: messages that have arrived and were not read, and what is on its way."""

    def __init__(self, lane: Lane, window_bytes: int) -> None:
        self.lane = lane
        self.arrived: deque[bytes] = deque()
        self.is_closed = False
        self._window_bytes = window_bytes
        self._unread_bytes = 0
        self._news = asyncio.Event()

    def news(self) -> None:
        self._news.set()

    async def room(self, ended: Callable[[], bool]) -> None:
        while self._unread_bytes >= self._window_bytes and not ended():
            await self._wait()

    def send(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        self.lane.send(lambda: self._arrive(data))

    def finish(self) -> None:
        self.lane.send(self.close)

    def close(self) -> None:
        self.is_closed = True
        self.news()

    async def next(self, ended: Callable[[], bool]) -> bytes | None:
        """None at the end: no more will come, or `ended`."""
        while not self.arrived and not self.is_closed and not ended():
            await self._wait()
        if not self.arrived:
            return None
        data = self.arrived.popleft()
        self._unread_bytes -= len(data)
        self.news()
        return data

    def _arrive(self, data: bytes) -> None:
        if self.is_closed:
            # Its reader has given up.
            return
        self.arrived.append(data)
        self.news()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class Wire:
    """A call between its two ends; `on_status` and `on_lost` are called when its end reaches them."""

    def __init__(self, link: Link, method: str, timeout_s: float | None, metadata: Metadata) -> None:
        self.link = link
        self.method = method
        self.timeout_s = timeout_s
        self.metadata = metadata
        self.requests = Half(Lane(link), link.window_bytes)
        self.responses = Half(Lane(link), link.window_bytes)
        # At the client.
        self.status: Status | None = None
        self.on_status: list[Callable[[], object]] = []
        # At the server.
        self.is_lost = False
        self.on_lost: Callable[[], object] = lambda: None
        link.calls[self] = None

    def client_lost(self, why: str) -> None:
        self.end(Status(grpc.StatusCode.UNAVAILABLE, why))

    def server_lost(self) -> None:
        """The client is gone, as far as the server can tell."""
        if not self.is_lost:
            self.is_lost = True
            self.responses.lane.close()
            self.requests.close()
            self.responses.news()
            self._leave_link()
            self.on_lost()

    def end(self, status: Status) -> None:
        """The client's view of the call is final."""
        if self.status is None:
            self.status = status
            self.responses.close()
            self.requests.news()
            self._leave_link()
            for callback in self.on_status:
                callback()

    def answer(self, status: Status) -> None:
        """The server has ended the call."""
        self.responses.lane.send(lambda: self.end(status))
        self.responses.lane.close()
        # Whatever the client still sends is not read.
        self.is_lost = True
        self.requests.close()
        self._leave_link()

    def _leave_link(self) -> None:
        """Once both ends are done with it."""
        if self.is_lost and self.status is not None:
            self.link.calls.pop(self, None)

    def may_break(self) -> None:
        """Called with each message that is sent."""
        if self.link.loss and self.link.rng.random() < self.link.loss:
            self.link.lose(self, self.link.rng.random() * _NOTICED_WITHIN_S)
