"""The streams by which routers take what their calls here produce: one message for each step, not one for each token.

Who holds a row: its stream from `put` until it is written; where the router is gone nobody, and its calls end with the
next row. A stream ends where its router leaves, or where the worker drains and has no call any more.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError, UnavailableError
from cluster_wire.step_outputs import StepRows

# Rows after which the router is asked to say what it has taken: each step of many calls, now and then one answer alone.
ROWS_TO_ACKNOWLEDGE = 64
# What it was asked for and has not said: one that it takes, and one behind it. What comes meanwhile waits here, and is
# one message.
MOST_ON_THEIR_WAY = 2


class OutputStream:
    """One router's. Written by its calls and read by `StreamOutputs`, on one loop."""

    def __init__(self) -> None:
        self._rows = StepRows()
        self._news = asyncio.Event()
        # Rows on their way behind what the router was last asked for.
        self._not_asked = 0
        self._on_their_way = 0
        self._has_ended = False
        self._is_gone = False

    @property
    def is_busy(self) -> bool:
        """The router has not said that it has taken what it was asked for: before a stream ends, everything."""
        return bool(self._rows) or self._on_their_way > 0 or (self._has_ended and self._not_asked > 0)

    def put_tokens(self, call: int, token_ids: Sequence[int], text: str) -> None:
        """Raises UnavailableError where nobody reads the stream any more."""
        self._check()
        self._rows.put_tokens(call, token_ids, text)
        self._news.set()

    def put(self, call: int, response: wire.DecodeResponse) -> None:
        """Raises as `put_tokens` does."""
        self._check()
        self._rows.put(call, response)
        self._news.set()

    def taken(self) -> None:
        """The router has taken the next message that it was asked for."""
        self._on_their_way -= 1
        self._news.set()

    def end(self) -> None:
        """After what was put."""
        self._has_ended = True
        self._news.set()

    def leave(self) -> None:
        """Its router is gone."""
        self._is_gone = True
        self._news.set()

    async def messages(self) -> AsyncIterator[wire.StreamOutputsResponse]:
        """The first one is empty: the stream is open."""
        yield wire.StreamOutputsResponse()
        # Not before the router has taken all of it: what it writes to a call that has ended makes gRPC drop the rest.
        while not self._is_gone and (self.is_busy or not self._has_ended):
            # Whoever it wakes is behind the calls that the same step has woken: their rows are one message.
            await self._news.wait()
            self._news.clear()
            while self._may_send():
                yield self._next()

    def _may_send(self) -> bool:
        is_last = self._has_ended and self._not_asked > 0
        return (bool(self._rows) or is_last) and self._on_their_way < MOST_ON_THEIR_WAY

    def _next(self) -> wire.StreamOutputsResponse:
        message = self._rows.take()
        self._not_asked += len(message.calls)
        if self._not_asked >= ROWS_TO_ACKNOWLEDGE or (self._has_ended and not self._rows):
            message.acknowledge = True
            self._not_asked = 0
            self._on_their_way += 1
        return message

    def _check(self) -> None:
        if self._is_gone:
            raise UnavailableError("the router does not take its calls' outputs any more")


class OutputStreams:
    """Of one worker, by the id that the router gave."""

    def __init__(self) -> None:
        self._open: dict[str, OutputStream] = {}
        # Those too that have ended, and are not over yet.
        self._running: set[OutputStream] = set()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def busy_streams(self) -> int:
        """On which something waits for its router."""
        return sum(stream.is_busy for stream in self._running)

    def of(self, stream_id: str) -> OutputStream:
        """Raises UnavailableError where it is not open."""
        stream = self._open.get(stream_id)
        if stream is None:
            raise UnavailableError("the router's output stream is not open")
        return stream

    @contextmanager
    def opened(self, stream_id: str) -> Iterator[OutputStream]:
        """Raises InvalidInputError."""
        if not stream_id or stream_id in self._open:
            raise InvalidInputError("must be given, and no other open stream's", field="stream_id")
        stream = self._open[stream_id] = OutputStream()
        self._running.add(stream)
        try:
            yield stream
        finally:
            self._open.pop(stream_id, None)
            self._running.discard(stream)
            stream.leave()

    def end(self) -> None:
        """All that are open: no call puts anything any more."""
        while self._open:
            self._open.popitem()[1].end()
