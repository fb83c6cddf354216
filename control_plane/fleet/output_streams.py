"""How what decode workers produce comes to this router: one stream for each worker, opened with the first call there.

Who holds a response: the stream until it is read, then the call that it is for until that takes it (`Unread`); where
the call is over, nobody. Memory is bounded by what the calls may generate. A stream that breaks ends all its calls; the
next one opens another.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from rachis import conventions, grpc_private
from rachis.v1 import worker_pb2 as wire

from cluster_core import event_log
from cluster_core.background import BackgroundTasks
from cluster_wire.step_outputs import Unread, rows_of


class Inbox:
    """Of one call. on_news: something has come, or the stream has changed."""

    def __init__(self, number: int, on_news: Callable[[], None]) -> None:
        self.number = number
        self.unread = Unread()
        self.on_news = on_news


class OutputStream:
    """`read` runs until it has ended."""

    def __init__(self) -> None:
        self.stream_id = uuid.uuid4().hex
        self.is_open = False
        self.has_ended = False
        # Why it has ended; None: the worker drains, and has no call of ours.
        self.error: Exception | None = ConnectionError("its output stream broke off")
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = itertools.count(1)
        # Messages that have come.
        self.taken = 0
        self.closes = False
        self._call: Any = None

    @contextmanager
    def receiving(self, on_news: Callable[[], None]) -> Iterator[Inbox]:
        """Around a call that names the stream, and the inbox's number."""
        inbox = Inbox(next(self._numbers), on_news)
        self._inboxes[inbox.number] = inbox
        try:
            yield inbox
        finally:
            del self._inboxes[inbox.number]
            self._close_if_unused()

    def close_when_unused(self) -> None:
        """Its worker has left the registry."""
        self.closes = True
        self._close_if_unused()

    async def read(self, call: Any, generation: int) -> None:
        """generation: of the worker."""
        self._call = call
        self._close_if_unused()
        try:
            await grpc_private.write(call, wire.StreamOutputsRequest(generation=generation, stream_id=self.stream_id))
            while (message := await conventions.next_message(call)) is not None:
                self.taken += 1
                if self.is_open:
                    self._deliver(message)
                    if message.acknowledge:
                        await grpc_private.write(call, wire.StreamOutputsRequest())
                else:
                    self.is_open = True
                    self._tell_all()
            self.error = None
        except (grpc.aio.AioRpcError, ValueError) as error:
            self.error = error
        finally:
            self.has_ended = True
            call.cancel()
            self._tell_all()

    def _deliver(self, message: wire.StreamOutputsResponse) -> None:
        """Calls hear of it once, however many rows are theirs."""
        news: dict[int, Inbox] = {}
        for row in rows_of(message):
            inbox = self._inboxes.get(row[0])
            if inbox is not None:
                inbox.unread.put(row)
                news[row[0]] = inbox
        for inbox in news.values():
            inbox.on_news()

    def _tell_all(self) -> None:
        for inbox in list(self._inboxes.values()):
            inbox.on_news()

    def _close_if_unused(self) -> None:
        if self.closes and not self._inboxes and self._call is not None:
            self._call.cancel()


class OutputStreams:
    """Of one router, by the worker's address and generation."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int], OutputStream] = {}
        self._reading = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._streams)

    def of(self, address: str, generation: int, begin: Callable[[], Any]) -> OutputStream:
        """The stream that is there, or one that is being opened. begin: makes its call."""
        stream = self._streams.get((address, generation))
        if stream is None or stream.has_ended or stream.closes:
            call, stream = begin(), OutputStream()
            self._streams[address, generation] = stream
            self._reading.start(self._read(address, generation, stream, call))
        return stream

    def keep_only(self, addresses: set[str]) -> None:
        """The others end with their last calls."""
        for (address, _), stream in list(self._streams.items()):
            if address not in addresses:
                stream.close_when_unused()

    async def close(self) -> None:
        await self._reading.cancel()

    async def _read(self, address: str, generation: int, stream: OutputStream, call: Any) -> None:
        # It outlives the request that it was begun for.
        event_log.about("")
        try:
            await stream.read(call, generation)
        finally:
            if self._streams.get((address, generation)) is stream:
                del self._streams[address, generation]
