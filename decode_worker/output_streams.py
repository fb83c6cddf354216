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

# Messages that the router has not taken: one that it takes, and one behind it. What comes meanwhile waits here, and is
# one message.
MOST_ON_THEIR_WAY = 2


class OutputStream:
    """One router's. Written by its calls and read by `StreamOutputs`, on one loop."""

    def __init__(self) -> None:
        self._rows = StepRows()
        self._news = asyncio.Event()
        self._on_their_way = 0
        self._has_ended = False
        self._is_gone = False

    @property
    def is_busy(self) -> bool:
        """Something of it has not been taken."""
        return bool(self._rows) or self._on_their_way > 0

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
        """The router has taken a message."""
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
            await self._news.wait()
            self._news.clear()
            # All calls that the step has woken put their rows in this turn of the loop.
            await asyncio.sleep(0)
            while self._rows and self._on_their_way < MOST_ON_THEIR_WAY:
                self._on_their_way += 1
                yield self._rows.take()

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
    def is_busy(self) -> bool:
        """Something waits for its router."""
        return any(stream.is_busy for stream in self._running)

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
