"""Requests that hold a slot until a test has them leave."""

import asyncio

from cluster_core.tenant_shares import Claimant
from control_plane.intake.admission import Admission


class Holder:
    """A request that holds a slot until it is told to leave."""

    def __init__(
        self,
        admission: Admission,
        tenant: str = "",
        priority: int = 0,
        tokens: int = 1,
        slots: int = 1,
        *,
        goes_on: bool = False,
    ) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.slots = slots
        self.goes_on = goes_on
        self.claimant = Claimant(priority, tenant)
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        slot = await admission.take(self.claimant, self.tokens, self.slots, goes_on=self.goes_on)
        try:
            self.entered.set()
            await self.leave.wait()
        finally:
            slot.release()

    async def done(self) -> None:
        self.leave.set()
        await self.task


async def settle() -> None:
    """Lets every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def counts(admission: Admission) -> tuple[int, int]:
    return admission.in_flight, admission.queued


def at_once() -> float:
    """The clock of a world in which nothing takes time."""
    return 0.0


async def entered(holders: list[Holder]) -> list[str]:
    await settle()
    return [holder.tenant for holder in holders if holder.entered.is_set()]


async def finish(holders: list[Holder]) -> None:
    for holder in holders:
        holder.leave.set()
    await asyncio.gather(*(holder.task for holder in holders), return_exceptions=True)


async def order_of(admission: Admission, holders: list[Holder]) -> str:
    """Who has the one slot, one after the other."""
    order = ""
    for _ in holders:
        await settle()
        (running,) = [holder for holder in holders if holder.entered.is_set() and not holder.task.done()]
        order += running.tenant
        await running.done()
    admission.check_invariants()
    return order
