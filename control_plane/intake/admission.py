"""How many requests the router works on at once, how many may wait, and what memory prompts take: above, it refuses.

The hint that goes with a refusal is the time the queue needs at the recent pace, between 100 ms and 30 s.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster_core.clock import monotonic_s
from cluster_core.errors import OverloadedError
from control_plane.intake.prompt_memory import PromptMemory

_PACE_WEIGHT = 0.1


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
    """One router's slots. Fair: who waits longest is next."""

    def __init__(
        self,
        max_in_flight: int,
        max_queued: int,
        queue_timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
        max_prompt_bytes: int = 1 << 30,
    ) -> None:
        self.prompts = PromptMemory(max_prompt_bytes)
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._now_s = now_s
        self._slots = asyncio.Semaphore(max_in_flight)
        self._service_s = 1.0
        self.queued = 0
        self.in_flight = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot for as long as the block runs; raises as `take` does."""
        slot = await self.take()
        try:
            yield
        finally:
            slot.release()

    async def take(self) -> Slot:
        """A slot. Raises OverloadedError when the queue is full or the wait too long."""
        if self._slots.locked() and self.queued >= self._max_queued:
            raise OverloadedError(
                f"{self.in_flight} requests run and {self.queued} wait, more are not taken",
                retry_after_ms=self.retry_after_ms(),
            )
        await self._wait()
        started_s = self._now_s()
        self.in_flight += 1
        return Slot(lambda: self._given_back(started_s))

    def _given_back(self, started_s: float) -> None:
        self.in_flight -= 1
        self._slots.release()
        self._service_s += _PACE_WEIGHT * (self._now_s() - started_s - self._service_s)

    def retry_after_ms(self) -> int:
        expected_s = self._service_s * (self.queued + 1) / self._max_in_flight
        return round(min(max(expected_s * 1000, 100), 30_000))

    async def _wait(self) -> None:
        self.queued += 1
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise OverloadedError(
                f"waited {self._queue_timeout_s:g} s for a place among {self._max_in_flight} running requests",
                retry_after_ms=self.retry_after_ms(),
            ) from None
        finally:
            self.queued -= 1
