"""What a session has sent, in order: kept until its end, so that another router can be told all of it."""

import asyncio
from array import array
from collections import deque
from dataclasses import dataclass

from rachis.v1 import router_pb2 as api


class KeptBytes:
    """How much the sessions of one client may keep together."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, count: int) -> bool:
        """False, and nothing is taken, where there is not so much left."""
        if count > self._left:
            return False
        self._left -= count
        return True

    def give_back(self, count: int) -> None:
        self._left += count


@dataclass(slots=True, eq=False)
class Sent:
    """One message. number: of those that a router was told, from 1, over all calls; 0 before. taken: once a call took
    it, True; False where none will. message: None once nobody is told it any more."""

    message: api.StreamGenerateRequest | None
    taken: asyncio.Future[bool]
    number: int = 0
    bytes_kept: int = 0


class Outbox:
    """One task adds, another writes what `next` gives, and tells of it by `written`."""

    def __init__(self, budget: KeptBytes) -> None:
        self._budget = budget
        self._keeps = True
        self._closed = False
        self._count = 0
        # What stands of what was told, for another call.
        self._kept: dict[int, Sent] = {}
        # Numbers of what the call of now was told, as it counts.
        self._told = array("Q")
        self._waiting: deque[Sent] = deque()
        # The first of those that wait is being written.
        self._writing = False
        self._news = asyncio.Event()

    @property
    def keeps_all(self) -> bool:
        """Whether another call can be told everything."""
        return self._keeps

    def number_of(self, place: int) -> int:
        """Of the message that the call of now counts as its `place`-th, from 1; 0 where it was told no such one."""
        return self._told[place - 1] if 0 < place <= len(self._told) else 0

    def add(self, message: api.StreamGenerateRequest) -> Sent:
        sent = Sent(message, asyncio.get_running_loop().create_future())
        if self._closed:
            sent.taken.set_result(False)
        else:
            self._waiting.append(sent)
            self._news.set()
        return sent

    async def next(self) -> api.StreamGenerateRequest:
        """What the call of now is to be told next. It may be refused from now on, and is told to another call, too."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        sent = self._waiting[0]
        assert sent.message is not None, "what waits has not been told"
        if not sent.number:
            self._count += 1
            sent.number = self._count
            self._keep(sent)
        self._told.append(sent.number)
        self._writing = True
        return sent.message

    def written(self) -> None:
        sent = self._waiting.popleft()
        self._writing = False
        if sent.number not in self._kept:
            sent.message = None
        self._taken(sent)

    def withdraw(self, sent: Sent) -> bool:
        """Takes back what nobody has been told. False where somebody has, or is being told."""
        if sent.number or sent not in self._waiting:
            return False
        self._waiting.remove(sent)
        return True

    def refused(self, number: int) -> None:
        """Another call need not be told it."""
        sent = self._kept.pop(number, None)
        if sent is not None:
            self._budget.give_back(sent.bytes_kept)

    def keep_no_more(self) -> None:
        """Nobody else will be told what this call was told."""
        self._keeps = False
        self._budget.give_back(sum(sent.bytes_kept for sent in self._kept.values()))
        waiting = set(map(id, self._waiting))
        for sent in self._kept.values():
            if id(sent) not in waiting:
                sent.message = None
        self._kept.clear()

    def start_again(self) -> None:
        """For another call: everything that stands is to be told."""
        untold = [sent for sent in self._waiting if not sent.number]
        if self._writing and self._waiting[0].number not in self._kept:
            # It was refused before it was written.
            self._taken(self._waiting[0])
        self._waiting = deque([*self._kept.values(), *untold])
        self._told, self._writing = array("Q"), False
        self._news.set()

    def close(self) -> None:
        """No call takes anything any more."""
        self._closed = True
        for sent in self._waiting:
            if not sent.taken.done():
                sent.taken.set_result(False)
        self.keep_no_more()

    def _taken(self, sent: Sent) -> None:
        if not sent.taken.done():
            sent.taken.set_result(True)

    def _keep(self, sent: Sent) -> None:
        assert sent.message is not None, "it is about to be told"
        if not self._keeps:
            return
        sent.bytes_kept = sent.message.ByteSize()
        if self._budget.take(sent.bytes_kept):
            self._kept[sent.number] = sent
        else:
            self.keep_no_more()
