"""How many requests the router works on at once, how many may wait, and what memory prompts take: above, it refuses.

The lowest priority number is served first, whoever waits longer. Of one priority tenants share the slots and the queue
fairly. A slot that is free goes to the tenant that has the fewest, and of its requests to the one that has waited
longest: max-min fairness, where each request is one. A full queue takes a request in place of the latest one of a
higher number, and of a tenant that has fewer waiting than another one in place of that one's latest (longest queue
drop, Suter et al. 1998). No tenant has more slots than its share. Without tenants all are one, and who waits longest
is next.

Requests of a priority above 0 are best effort. They have a part of the slots at most, so that the others need not wait
for one of them to end.

The hint that goes with a refusal is the time the queue needs at the recent pace, between 100 ms and 30 s.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from cluster_core.clock import monotonic_s
from cluster_core.errors import OverloadedError
from control_plane.intake.prompt_memory import PromptMemory

_PACE_WEIGHT = 0.1
_Wait = asyncio.Future[None]


class Claimant(NamedTuple):
    """Whose requests wait in one line."""

    priority: int = 0
    tenant: str = ""

    @property
    def is_best_effort(self) -> bool:
        return self.priority > 0


_ANYBODY = Claimant()


class Slot:
    """A place among the running requests, until it is given back."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """A second time changes nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Admission:
    """One router's slots. Of these, what may be had by one tenant: tenant_share; by best effort: best_effort_share."""

    def __init__(
        self,
        max_in_flight: int,
        max_queued: int,
        queue_timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
        max_prompt_bytes: int = 1 << 30,
        tenant_share: float = 1.0,
        best_effort_share: float = 1.0,
    ) -> None:
        self.prompts = PromptMemory(max_prompt_bytes)
        self._max_in_flight = max_in_flight
        self._most_of_tenant = max(1, int(max_in_flight * tenant_share))
        self._most_best_effort = max(1, int(max_in_flight * best_effort_share))
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._now_s = now_s
        self._service_s = 1.0
        # By tenant.
        self._running: Counter[str] = Counter()
        self._best_effort = 0
        # Who waits longest first; no claimant without any.
        self._waiting: dict[Claimant, deque[_Wait]] = {}
        # Of each tenant that has something here, when it got a slot last, counted in slots.
        self._turns: Counter[str] = Counter()
        self._turn = 0

    @property
    def in_flight(self) -> int:
        return self._running.total()

    @property
    def queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, claimant: Claimant = _ANYBODY) -> AsyncIterator[None]:
        """Holds a slot for as long as the block runs; raises as `take` does."""
        slot = await self.take(claimant)
        try:
            yield
        finally:
            slot.release()

    async def take(self, claimant: Claimant = _ANYBODY) -> Slot:
        """A slot. Raises OverloadedError when the queue is full or the wait too long."""
        if claimant in self._waiting or not self._has_room(claimant):
            await self._wait(claimant)
        else:
            self._run(claimant)
        started_s = self._now_s()
        return Slot(lambda: self._given_back(claimant, started_s))

    def check_invariants(self) -> None:
        tenants = {*self._running, *(each.tenant for each in self._waiting)}
        assert self._turns.keys() <= tenants, "somebody is remembered who has nothing here"
        assert 0 <= self._best_effort <= self.in_flight, "best effort is miscounted"

    def retry_after_ms(self) -> int:
        expected_s = self._service_s * (self.queued + 1) / self._max_in_flight
        return round(min(max(expected_s * 1000, 100), 30_000))

    def _given_back(self, claimant: Claimant, started_s: float) -> None:
        self._service_s += _PACE_WEIGHT * (self._now_s() - started_s - self._service_s)
        self._free(claimant)

    def _has_room(self, claimant: Claimant) -> bool:
        if claimant.is_best_effort and self._best_effort >= self._most_best_effort:
            return False
        return self.in_flight < self._max_in_flight and self._running[claimant.tenant] < self._most_of_tenant

    def _run(self, claimant: Claimant) -> None:
        self._running[claimant.tenant] += 1
        self._best_effort += claimant.is_best_effort
        self._turn += 1
        self._turns[claimant.tenant] = self._turn

    def _free(self, claimant: Claimant) -> None:
        self._running[claimant.tenant] -= 1
        self._best_effort -= claimant.is_best_effort
        if not self._running[claimant.tenant]:
            del self._running[claimant.tenant]
        self._give()
        self._forget(claimant.tenant)

    def _forget(self, tenant: str) -> None:
        if tenant not in self._running and all(each.tenant != tenant for each in self._waiting):
            self._turns.pop(tenant, None)

    def _give(self) -> None:
        """Slots that are free go to who is next."""
        while True:
            waiting = [each for each in self._waiting if self._has_room(each)]
            if not waiting:
                return
            # Tenants take turns where they have as many.
            first = min(waiting, key=lambda each: (each.priority, self._running[each.tenant], self._turns[each.tenant]))
            wait = self._waiting[first][0]
            self._leave(first, wait)
            # Who has just been cancelled has not left by itself yet.
            if not wait.done():
                self._run(first)
                wait.set_result(None)

    async def _wait(self, claimant: Claimant) -> None:
        self._make_room(claimant)
        wait: _Wait = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(claimant, deque()).append(wait)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await wait
        except BaseException as error:
            self._gone(claimant, wait)
            if isinstance(error, TimeoutError):
                raise self._refusal(
                    f"waited {self._queue_timeout_s:g} s for a place among {self._max_in_flight} running requests"
                ) from None
            raise

    def _make_room(self, claimant: Claimant) -> None:
        """In the queue. Raises OverloadedError."""
        if self.queued < self._max_queued:
            return
        last = max((each.priority for each in self._waiting), default=claimant.priority)
        lines = {each: len(waits) for each, waits in self._waiting.items() if each.priority == last}
        fullest = max(lines, key=lambda each: lines[each], default=claimant)
        is_before = claimant.priority < last
        if not is_before and (claimant.priority > last or lines.get(fullest, 0) <= lines.get(claimant, 0) + 1):
            raise self._refusal(f"{self.in_flight} requests run and {self.queued} wait, more are not taken")
        why = "requests of a lower priority number" if is_before else "most of them of this tenant"
        refusal = self._refusal(f"{self.queued} requests wait, {why}: the latest make room")
        latest = self._waiting[fullest][-1]
        self._leave(fullest, latest)
        if not latest.done():
            latest.set_exception(refusal)

    def _gone(self, claimant: Claimant, wait: _Wait) -> None:
        """Whoever waited does so no more; a slot that was given at the same moment goes to the next."""
        if not wait.done() or wait.cancelled():
            self._leave(claimant, wait)
        elif wait.exception() is None:
            self._free(claimant)

    def _leave(self, claimant: Claimant, wait: _Wait) -> None:
        """Who has left already does nothing."""
        waiting = self._waiting.get(claimant, deque())
        if wait in waiting:
            waiting.remove(wait)
            if not waiting:
                del self._waiting[claimant]
                self._forget(claimant.tenant)

    def _refusal(self, sentence: str) -> OverloadedError:
        return OverloadedError(sentence, retry_after_ms=self.retry_after_ms())
