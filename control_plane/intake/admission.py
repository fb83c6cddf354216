"""How many requests the router works on at once, how many may wait, and what memory prompts take: above, it refuses.

Tenants share the slots and the queue fairly. A slot that is free goes to the tenant that has the fewest, and of its
requests to the one that has waited longest: max-min fairness, where each request is one. A full queue takes a request
of a tenant that has fewer waiting than another one in place of that one's latest (longest queue drop, Suter et al.
1998). No tenant has more slots than its share. Without tenants all are one, and who waits longest is next.

The hint that goes with a refusal is the time the queue needs at the recent pace, between 100 ms and 30 s.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster_core.clock import monotonic_s
from cluster_core.errors import OverloadedError
from control_plane.intake.prompt_memory import PromptMemory

_PACE_WEIGHT = 0.1
_Wait = asyncio.Future[None]


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
    """One router's slots. tenant_share: of the slots, that one tenant may have."""

    def __init__(
        self,
        max_in_flight: int,
        max_queued: int,
        queue_timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
        max_prompt_bytes: int = 1 << 30,
        tenant_share: float = 1.0,
    ) -> None:
        self.prompts = PromptMemory(max_prompt_bytes)
        self._max_in_flight = max_in_flight
        self._most_of_tenant = max(1, int(max_in_flight * tenant_share))
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._now_s = now_s
        self._service_s = 1.0
        self._running: Counter[str] = Counter()
        # By tenant, who waits longest first; no tenant without any.
        self._waiting: dict[str, deque[_Wait]] = {}
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
    async def slot(self, tenant: str = "") -> AsyncIterator[None]:
        """Holds a slot for as long as the block runs; raises as `take` does."""
        slot = await self.take(tenant)
        try:
            yield
        finally:
            slot.release()

    async def take(self, tenant: str = "") -> Slot:
        """A slot. Raises OverloadedError when the queue is full or the wait too long."""
        if tenant in self._waiting or not self._has_room(tenant):
            await self._wait(tenant)
        else:
            self._run(tenant)
        started_s = self._now_s()
        return Slot(lambda: self._given_back(tenant, started_s))

    def retry_after_ms(self) -> int:
        expected_s = self._service_s * (self.queued + 1) / self._max_in_flight
        return round(min(max(expected_s * 1000, 100), 30_000))

    def _given_back(self, tenant: str, started_s: float) -> None:
        self._service_s += _PACE_WEIGHT * (self._now_s() - started_s - self._service_s)
        self._free(tenant)

    def _has_room(self, tenant: str) -> bool:
        return self.in_flight < self._max_in_flight and self._running[tenant] < self._most_of_tenant

    def _run(self, tenant: str) -> None:
        self._running[tenant] += 1
        self._turn += 1
        self._turns[tenant] = self._turn

    def _free(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._give()
        self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if tenant not in self._running and tenant not in self._waiting:
            self._turns.pop(tenant, None)

    def _give(self) -> None:
        """Slots that are free go to who is next."""
        while True:
            waiting = [tenant for tenant in self._waiting if self._has_room(tenant)]
            if not waiting:
                return
            # They take turns where they have as many.
            tenant = min(waiting, key=lambda each: (self._running[each], self._turns[each]))
            wait = self._waiting[tenant][0]
            self._leave(tenant, wait)
            # Who has just been cancelled has not left by itself yet.
            if not wait.done():
                self._run(tenant)
                wait.set_result(None)

    async def _wait(self, tenant: str) -> None:
        self._make_room(tenant)
        wait: _Wait = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(wait)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await wait
        except BaseException as error:
            self._gone(tenant, wait)
            if isinstance(error, TimeoutError):
                raise self._refusal(
                    f"waited {self._queue_timeout_s:g} s for a place among {self._max_in_flight} running requests"
                ) from None
            raise

    def _make_room(self, tenant: str) -> None:
        """In the queue. Raises OverloadedError."""
        if self.queued < self._max_queued:
            return
        fullest = max(self._waiting, key=lambda each: len(self._waiting[each]), default=tenant)
        if len(self._waiting.get(fullest, ())) <= len(self._waiting.get(tenant, ())) + 1:
            raise self._refusal(f"{self.in_flight} requests run and {self.queued} wait, more are not taken")
        refusal = self._refusal(f"{self.queued} requests wait, most of them of this tenant: its latest make room")
        latest = self._waiting[fullest][-1]
        self._leave(fullest, latest)
        if not latest.done():
            latest.set_exception(refusal)

    def _gone(self, tenant: str, wait: _Wait) -> None:
        """Whoever waited does so no more; a slot that was given at the same moment goes to the next."""
        if not wait.done() or wait.cancelled():
            self._leave(tenant, wait)
        elif wait.exception() is None:
            self._free(tenant)

    def _leave(self, tenant: str, wait: _Wait) -> None:
        """Who has left already does nothing."""
        waiting = self._waiting.get(tenant, deque())
        if wait in waiting:
            waiting.remove(wait)
            if not waiting:
                del self._waiting[tenant]
                self._forget(tenant)

    def _refusal(self, sentence: str) -> OverloadedError:
        return OverloadedError(sentence, retry_after_ms=self.retry_after_ms())
