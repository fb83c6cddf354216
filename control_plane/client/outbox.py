"""What a session has sent, in order: kept until its answer begins, so that another router can be told all of it."""

import asyncio

from rachis.v1 import router_pb2 as api


class Outbox:
    """Messages are numbered from 1, as a session's events count them, over all calls that carry them.

    One task adds, one writes (`next`, `written`). max_bytes: what is kept; a session of more stays with its router.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept_bytes = 0
        # Of those that stand: not refused, and all that was sent before as long as it is kept.
        self._messages: dict[int, api.StreamGenerateRequest] = {}
        self._count = 0
        # What the call of now has been told, in the order of that call, and what it is still to be told.
        self._told: list[int] = []
        self._waiting: list[int] = []
        self._changed = asyncio.Condition()
        self._closed = False
        self._keeps = True

    @property
    def keeps_all(self) -> bool:
        """Whether another call can be told everything."""
        return self._keeps

    def number_of(self, place: int) -> int:
        """Of the message that the call of now counts as its `place`-th, from 1."""
        return self._told[place - 1] if 0 < place <= len(self._told) else place

    async def add(self, message: api.StreamGenerateRequest) -> int:
        async with self._changed:
            self._count += 1
            self._messages[self._count] = message
            self._waiting.append(self._count)
            self._kept_bytes += message.ByteSize()
            if self._kept_bytes > self._max_bytes:
                self.keep_no_more()
            self._changed.notify_all()
            return self._count

    async def sent(self, number: int) -> bool:
        """Waits until a call took it; False where no call will."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or number not in self._waiting)
            return number not in self._waiting

    async def next(self) -> api.StreamGenerateRequest:
        """What the call of now is to be told next; it counts as told when `written` was called."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._waiting))
            return self._messages[self._waiting[0]]

    async def written(self) -> None:
        async with self._changed:
            number = self._waiting.pop(0)
            self._told.append(number)
            if not self._keeps:
                self._messages.pop(number, None)
            self._changed.notify_all()

    def refused(self, number: int) -> None:
        """Another call need not be told it."""
        self._messages.pop(number, None)

    def keep_no_more(self) -> None:
        """Nobody else will be told what this call was told."""
        self._keeps = False
        for number in self._told:
            self._messages.pop(number, None)

    def start_again(self) -> None:
        """For another call: everything that stands is to be told."""
        self._told, self._waiting = [], list(self._messages)

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
