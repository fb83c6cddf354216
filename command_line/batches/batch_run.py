"""Sends the requests of a batch, a few at a time, each until it has an answer that stays.

A service that is full, starts again or is not there is asked again when it says, or later and later; what the service
fails at, a few times. A request that can never work has its answer at once. At the end of the time that the batch has,
what is left has expired. That nobody is there is said once, where nobody has answered for as long as the longest pause
or at all, and that somebody answers again.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster_core.clock import monotonic_s
from command_line.batches.batch_file import BatchAnswer, BatchRequest
from command_line.batches.batch_terms import BatchFigures, BatchLimits

# The service had no room, or was not there: nothing was computed.
_FULL = frozenset({429, 503})
# Something was, and did not end well.
_FAILED = frozenset({500, 502, 504})
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

_EXPIRED = "batch_expired"
# Of a try that reached nobody.
UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Reply:
    """What one try came to. retry_after_s: when the service says that another one may help."""

    answer: BatchAnswer
    retry_after_s: float | None = None


# One try; where nobody answers, an answer without a status.
Send = Callable[[BatchRequest], Awaitable[Reply]]


_SILENT = Reply(BatchAnswer(code="silent", message="the service did not answer in time"))


@dataclass(slots=True)
class BatchRun:
    """`done` gets each request with its answer, in the order in which answers come; `say` what somebody may have to do
    something about while it goes on."""

    send: Send
    limits: BatchLimits
    done: Callable[[BatchRequest, BatchAnswer], None]
    now_s: Callable[[], float] = monotonic_s
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    rng: random.Random = field(default_factory=random.Random)
    figures: BatchFigures = field(default_factory=BatchFigures)
    say: Callable[[str], None] = lambda sentence: None
    _ends_s: float = 0.0
    _answered_s: float = -math.inf
    _is_gone: bool = False

    async def run(self, requests: Sequence[BatchRequest]) -> BatchFigures:
        self._ends_s = self.now_s() + self.limits.window_s
        waiting = iter(requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.limits.concurrency, len(requests))):
                group.create_task(self._work(waiting))
        return self.figures

    async def _work(self, waiting: Iterator[BatchRequest]) -> None:
        for request in waiting:
            answer = await self._answer(request)
            self.figures.answered += answer.is_good
            self.figures.failed += not answer.is_good
            self.figures.expired += answer.code == _EXPIRED
            self.done(request, answer)

    async def _answer(self, request: BatchRequest) -> BatchAnswer:
        failures, pause_s, last = 0, _FIRST_PAUSE_S, ""
        while (left_s := self._ends_s - self.now_s()) > 0:
            try:
                async with asyncio.timeout(min(left_s, self.limits.try_s)):
                    reply = await self.send(request)
            except TimeoutError:
                reply = _SILENT
            answer = reply.answer
            self._heard(answer)
            last = f", the last try: {answer.message or answer.status}"
            failures += answer.status in _FAILED
            is_full = not answer.status or answer.status in _FULL
            if not is_full and (answer.status not in _FAILED or failures >= self.limits.tries):
                return answer
            wait_s = max(reply.retry_after_s or 0.0, pause_s * self.rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.figures.tried_again += 1
            await self.sleep(min(wait_s, max(0.0, self._ends_s - self.now_s())))
        return BatchAnswer(code=_EXPIRED, message=f"the batch's time was over before the request had an answer{last}")

    def _heard(self, answer: BatchAnswer) -> None:
        if answer.status:
            self._answered_s = self.now_s()
            if self._is_gone:
                self._is_gone = False
                self.say("answers again")
        elif answer.code == UNREACHABLE and not self._is_gone:
            # A connection that breaks beside others that hold is nothing to tell.
            self._is_gone = self.now_s() - self._answered_s >= _LONGEST_PAUSE_S
            if self._is_gone:
                self.say(
                    f"does not answer: {answer.message}; it is asked again, every {_LONGEST_PAUSE_S:g} s in the end"
                )
