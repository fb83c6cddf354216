"""How many requests the router works on at once, how many may wait, and what memory prompts take: above, it refuses.

The lowest priority number is served first, whoever waits longer. Of one priority tenants share the slots and the queue
fairly. A slot that is free goes to the tenant that has had the fewest tokens for its weight
(`cluster_core.tenant_shares`), and of its requests to the one that has waited longest. Who holds a slot for longer than
its tokens take at the recent pace of all has had the tokens of that time. A full queue takes a request in place of the
latest one of a higher number, and of a tenant that has fewer waiting for its weight than another one in place of that
one's latest (longest queue drop, Suter et al. 1998). No tenant is given a slot beyond its share. Without tenants all
are one, and who waits longest is next. A session that goes on waits in line as any, and no full queue refuses it: what
it has sent would be lost. There are no more of them than may be open.

Requests of a priority above 0 are best effort. They have a part of the slots at most, so that the others need not wait
for one of them to end; a request of several choices may take more by what it is owed.

A request of several choices takes a slot for each, until that has ended. It begins where one is free, as any, and those
that it is short of are owed: nobody else begins for as long. So it need not wait for many at once, and one that wants
more than there are is answered, too.

The hint that goes with a refusal is the time the queue needs at the recent pace, between 100 ms and 30 s.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster_core.clock import monotonic_s
from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import LEAST_TOKENS, Claimant, TenantShares
from control_plane.intake.prompt_memory import PromptMemory

_PACE_WEIGHT = 0.1

WeightOf = Callable[[str], float]
_ANYBODY = Claimant()


@dataclass(slots=True, eq=False)
class _Wait:
    """Of one request, for so many slots. given: the weight that it begins with. number: who comes later has a higher
    one. goes_on: it has had a slot before."""

    given: asyncio.Future[float]
    tokens: int
    slots: int
    number: int
    goes_on: bool


class Slot:
    """A place among the running requests, or one for each choice, until it is given back. tokens: of prompt and
    answers, as they are expected, until its holder knows better."""

    def __init__(
        self, tokens: int, slots: int, give_one_back: Callable[[], None], give_back: Callable[[int], None]
    ) -> None:
        self.tokens = tokens
        self._left = slots
        self._give_one_back = give_one_back
        self._give_back: Callable[[int], None] | None = give_back

    def choice_ended(self) -> None:
        """Its place is given back at once, but for that of the last one."""
        if self._give_back is not None and self._left > 1:
            self._left -= 1
            self._give_one_back()

    def release(self) -> None:
        """A second time changes nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.tokens)


class Admission:
    """One router's slots, and its memory for prompts. Of either may be had by one tenant: tenant_share; by best effort:
    best_effort_share."""

    def __init__(
        self,
        max_in_flight: int,
        max_queued: int,
        queue_timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
        max_prompt_bytes: int = 1 << 30,
        tenant_share: float = 1.0,
        best_effort_share: float = 1.0,
        weight_of: WeightOf = lambda tenant: 1.0,
    ) -> None:
        self.prompts = PromptMemory(max_prompt_bytes, tenant_share, best_effort_share, now_s)
        self._max_in_flight = max_in_flight
        self._most_of_tenant = max(1, int(max_in_flight * tenant_share))
        self._most_best_effort = max(1, int(max_in_flight * best_effort_share))
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._now_s = now_s
        # Of a request, lately.
        self._service_s = 1.0
        self._service_tokens = 0.0
        # By tenant.
        self._running: Counter[str] = Counter()
        self._in_flight = 0
        self._best_effort = 0
        # Who waits longest first; no claimant without any.
        self._waiting: dict[Claimant, deque[_Wait]] = {}
        self._queued = 0
        # Of those, whom a full queue may refuse.
        self._refusable: Counter[Claimant] = Counter()
        self._came = 0
        self._weight_of = weight_of
        self._shares = TenantShares()
        # How much each has here: slots, and requests that wait.
        self._here: Counter[Claimant] = Counter()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def short_of_slots(self) -> int:
        """Who waits because all slots are taken, and not for its share: while slots are free none does."""
        return sum(len(waits) for claimant, waits in self._waiting.items() if not self._has_its_share(claimant))

    @asynccontextmanager
    async def slot(self, claimant: Claimant = _ANYBODY, tokens: int = 1) -> AsyncIterator[Slot]:
        """Holds a slot for as long as the block runs; raises as `take` does."""
        slot = await self.take(claimant, tokens)
        try:
            yield slot
        finally:
            slot.release()

    async def take(
        self, claimant: Claimant = _ANYBODY, tokens: int = 1, slots: int = 1, *, goes_on: bool = False
    ) -> Slot:
        """A slot, or several in one. tokens: that are expected. goes_on: a session that has had one before.

        Raises OverloadedError when the queue is full, but for one that goes on, or the wait too long.
        """
        if self._may_begin(claimant):
            return self._begun(claimant, tokens, slots)
        weight = await self._wait(claimant, tokens, slots, goes_on=goes_on)
        return self._slot_of(claimant, tokens, slots, weight)

    def take_free(self, claimant: Claimant = _ANYBODY) -> Slot | None:
        """A slot that nobody waits for, for no tokens; None where there is none."""
        return self._begun(claimant, 0, 1) if self._may_begin(claimant) else None

    def check_invariants(self) -> None:
        assert self.in_flight == self._running.total(), "who runs is miscounted"
        assert self.queued == sum(map(len, self._waiting.values())), "who waits is miscounted"
        assert self._shares.here == self._here.keys(), "somebody has a share who is not here"
        assert self._here.total() == self.in_flight + self.queued, "somebody here is miscounted"
        assert self._waiting.keys() <= self._here.keys(), "somebody waits who is not here"
        refusable = {each: sum(not wait.goes_on for wait in waits) for each, waits in self._waiting.items()}
        assert self._refusable == refusable, "who may be refused is miscounted"
        self._shares.check_invariants()
        assert 0 <= self._best_effort <= self.in_flight, "best effort is miscounted"

    def retry_after_ms(self) -> int:
        expected_s = self._service_s * (self.queued + 1) / self._max_in_flight
        return round(min(max(expected_s * 1000, 100), 30_000))

    def _note_pace(self, held_s: float, tokens: int, slots: int) -> int:
        """How many tokens slots that were held for so long, in the mean, are worth."""
        self._service_s += _PACE_WEIGHT * (held_s - self._service_s)
        self._service_tokens += _PACE_WEIGHT * (tokens / slots - self._service_tokens)
        # Where all have taken no time, so has this one.
        return int(slots * self._service_tokens * held_s / self._service_s) if held_s > 0 else 0

    def _may_begin(self, claimant: Claimant) -> bool:
        """It has to wait for nobody."""
        return claimant not in self._waiting and self._has_room(claimant)

    def _begun(self, claimant: Claimant, tokens: int, slots: int) -> Slot:
        self._comes(claimant)
        return self._slot_of(claimant, tokens, slots, self._run(claimant, tokens, slots))

    def _slot_of(self, claimant: Claimant, tokens: int, slots: int, weight: float) -> Slot:
        started_s = self._now_s()
        # How long choices took that have ended.
        ended_s: list[float] = []

        def give_one_back() -> None:
            ended_s.append(self._now_s() - started_s)
            self._free(claimant, 1)

        def give_back(used: int) -> None:
            left = slots - len(ended_s)
            held_s = (sum(ended_s) + left * (self._now_s() - started_s)) / slots
            as_long = self._note_pace(held_s, used, slots)
            self._put_right(claimant, tokens, max(used, as_long), slots, weight)
            self._free(claimant, left)

        return Slot(tokens, slots, give_one_back, give_back)

    def _has_room(self, claimant: Claimant) -> bool:
        if claimant.is_best_effort and self._best_effort >= self._most_best_effort:
            return False
        return self.in_flight < self._max_in_flight and self._running[claimant.tenant] < self._most_of_tenant

    def _has_its_share(self, claimant: Claimant) -> bool:
        """More slots would be none for it."""
        of_class = claimant.is_best_effort and self._most_best_effort <= self._best_effort < self._max_in_flight
        return of_class or self._most_of_tenant <= self._running[claimant.tenant] < self._max_in_flight

    def _comes(self, claimant: Claimant) -> None:
        """To the queue, or past it."""
        if claimant not in self._waiting:
            self._shares.comes(claimant)
        self._here[claimant] += 1

    def _goes(self, claimant: Claimant, slots: int = 1) -> None:
        self._here[claimant] -= slots
        if self._here[claimant]:
            return
        del self._here[claimant]
        self._shares.leaves(claimant)

    def _run(self, claimant: Claimant, tokens: int, slots: int) -> float:
        """The weight that it begins with."""
        self._running[claimant.tenant] += slots
        self._in_flight += slots
        self._best_effort += slots * claimant.is_best_effort
        # One of them was counted when it came.
        self._here[claimant] += slots - 1
        weight = self._weight_of(claimant.tenant)
        self._shares.begins(claimant, max(tokens, slots * LEAST_TOKENS), weight)
        return weight

    def _put_right(self, claimant: Claimant, guessed: int, tokens: int, slots: int, weight: float) -> None:
        """What was taken for `guessed` tokens when it began took so many."""
        least = slots * LEAST_TOKENS
        self._shares.put_right(claimant, max(tokens, least) - max(guessed, least), weight)

    def _free(self, claimant: Claimant, slots: int) -> None:
        self._running[claimant.tenant] -= slots
        self._in_flight -= slots
        self._best_effort -= slots * claimant.is_best_effort
        if not self._running[claimant.tenant]:
            del self._running[claimant.tenant]
        self._goes(claimant, slots)
        self._give()

    def _give(self) -> None:
        """Slots that are free go to who is next."""
        while self._in_flight < self._max_in_flight:
            waiting = [each for each in self._waiting if self._has_room(each)]
            if not waiting:
                return
            first = min(waiting, key=self._place)
            wait = self._waiting[first][0]
            # Who has just been cancelled has not left by itself yet.
            if wait.given.done():
                self._leave(first, wait)
                continue
            self._take_out(first, wait)
            wait.given.set_result(self._run(first, wait.tokens, wait.slots))

    def _place(self, claimant: Claimant) -> tuple[int, float, int]:
        """Of those who wait; the lowest is next, and of equals who waits longest."""
        return (
            claimant.priority,
            self._shares.start(claimant),
            self._waiting[claimant][0].number,
        )

    async def _wait(self, claimant: Claimant, tokens: int, slots: int, *, goes_on: bool) -> float:
        """The weight that it begins with. Raises OverloadedError."""
        if not goes_on:
            self._make_room(claimant)
        self._came += 1
        wait = _Wait(asyncio.get_running_loop().create_future(), tokens, slots, self._came, goes_on)
        self._comes(claimant)
        self._waiting.setdefault(claimant, deque()).append(wait)
        self._queued += 1
        self._refusable[claimant] += not goes_on
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await wait.given
        except BaseException as error:
            self._gone(claimant, wait)
            if isinstance(error, TimeoutError):
                raise self._refusal(
                    f"waited {self._queue_timeout_s:g} s for a place among {self._max_in_flight} running requests"
                ) from None
            raise

    def _make_room(self, claimant: Claimant) -> None:
        """In the queue. Raises OverloadedError. Sessions that go on stand beside it: they keep nobody out."""
        if self._refusable.total() < self._max_queued:
            return
        refusable = {each: waits for each, waits in self._refusable.items() if waits}
        last = max((each.priority for each in refusable), default=claimant.priority)
        is_before = claimant.priority < last
        # However little a tenant's weight, one of its requests may wait.
        lines = [each for each, waits in refusable.items() if each.priority == last and (is_before or waits > 1)]
        fullest = max(lines, key=self._fill, default=claimant)
        if not is_before and (claimant.priority > last or self._fill(fullest) <= self._fill(claimant, 1)):
            raise self._refusal(f"{self.in_flight} requests run and {self.queued} wait, more are not taken")
        why = "requests of a lower priority number" if is_before else "most of them of this tenant"
        refusal = self._refusal(f"{self.queued} requests wait, {why}: the latest make room")
        latest = next(each for each in reversed(self._waiting[fullest]) if not each.goes_on)
        self._leave(fullest, latest)
        if not latest.given.done():
            latest.given.set_exception(refusal)

    def _fill(self, claimant: Claimant, more: int = 0) -> float:
        """How many wait in a line that may be refused, for its weight."""
        return (self._refusable[claimant] + more) / self._weight_of(claimant.tenant)

    def _gone(self, claimant: Claimant, wait: _Wait) -> None:
        """Whoever waited does so no more; a slot that was given at the same moment goes to the next."""
        if not wait.given.done() or wait.given.cancelled():
            self._leave(claimant, wait)
        elif wait.given.exception() is None:
            self._put_right(claimant, wait.tokens, 0, wait.slots, wait.given.result())
            self._free(claimant, wait.slots)

    def _leave(self, claimant: Claimant, wait: _Wait) -> None:
        """Who has left already does nothing."""
        if wait in self._waiting.get(claimant, ()):
            self._take_out(claimant, wait)
            self._goes(claimant)

    def _take_out(self, claimant: Claimant, wait: _Wait) -> None:
        """Of its line."""
        waiting = self._waiting[claimant]
        waiting.remove(wait)
        self._queued -= 1
        self._refusable[claimant] -= not wait.goes_on
        if not waiting:
            del self._waiting[claimant], self._refusable[claimant]

    def _refusal(self, sentence: str) -> OverloadedError:
        return OverloadedError(sentence, retry_after_ms=self.retry_after_ms())
