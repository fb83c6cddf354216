"""Slots and the queue for them: bounded, fair, and nothing is lost when a waiter leaves."""

import asyncio

import pytest

from cluster_core.errors import OverloadedError
from control_plane.intake.admission import Admission
from tests import simulated_time


class Holder:
    """A request that holds a slot until it is told to leave."""

    def __init__(self, admission: Admission) -> None:
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        async with admission.slot():
            self.entered.set()
            await self.leave.wait()

    async def done(self) -> None:
        self.leave.set()
        await self.task


async def settle() -> None:
    """Lets every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def counts(admission: Admission) -> tuple[int, int]:
    return admission.in_flight, admission.queued


async def test_requests_beyond_the_slots_wait_and_beyond_the_queue_are_refused() -> None:
    admission = Admission(2, 1, 30.0)
    holders = [Holder(admission) for _ in range(3)]
    await settle()
    assert counts(admission) == (2, 1)

    with pytest.raises(OverloadedError, match="2 requests run and 1 wait") as caught:
        async with admission.slot():
            pass

    assert caught.value.retry_after_ms is not None
    assert counts(admission) == (2, 1)
    await asyncio.gather(*(holder.done() for holder in holders))
    assert counts(admission) == (0, 0)


async def test_without_a_queue_free_slots_are_still_given() -> None:
    admission = Admission(1, 0, 30.0)
    async with admission.slot():
        with pytest.raises(OverloadedError):
            async with admission.slot():
                pass

    async with admission.slot():
        assert counts(admission) == (1, 0)


async def test_who_waits_longest_is_next() -> None:
    admission = Admission(1, 10, 30.0)
    holders = []
    for _ in range(4):
        holders.append(Holder(admission))
        await settle()

    for index, holder in enumerate(holders):
        assert [other.entered.is_set() for other in holders] == [True] * (index + 1) + [False] * (3 - index)
        await holder.done()
        await settle()


async def test_a_newcomer_does_not_overtake_a_waiter_that_was_just_woken() -> None:
    admission = Admission(1, 10, 30.0)
    first, waiter = Holder(admission), Holder(admission)
    await settle()
    first.leave.set()
    await first.task

    newcomer = Holder(admission)
    await settle()

    assert (waiter.entered.is_set(), newcomer.entered.is_set()) == (True, False)
    await waiter.done()
    await newcomer.done()


async def test_a_cancelled_waiter_leaves_the_queue_and_a_cancelled_holder_its_slot() -> None:
    admission = Admission(1, 10, 30.0)
    holder, waiter, last = Holder(admission), Holder(admission), Holder(admission)
    await settle()
    assert counts(admission) == (1, 2)

    waiter.task.cancel()
    await settle()
    assert counts(admission) == (1, 1)

    holder.task.cancel()
    await settle()
    assert last.entered.is_set()
    assert counts(admission) == (1, 0)
    await last.done()
    assert counts(admission) == (0, 0)


async def test_a_waiter_cancelled_as_it_gets_the_slot_does_not_keep_it() -> None:
    admission = Admission(1, 10, 30.0)
    holder, waiter = Holder(admission), Holder(admission)
    await settle()

    holder.leave.set()
    await holder.task
    waiter.task.cancel()
    await settle()

    async with asyncio.timeout(5), admission.slot():
        assert counts(admission) == (1, 0)


async def test_a_slot_is_given_back_when_its_holder_fails() -> None:
    admission = Admission(1, 0, 30.0)
    with pytest.raises(ZeroDivisionError):
        async with admission.slot():
            raise ZeroDivisionError

    assert counts(admission) == (0, 0)
    async with admission.slot():
        pass


def test_a_wait_beyond_the_timeout_is_refused_with_a_hint() -> None:
    async def wait() -> OverloadedError:
        admission = Admission(1, 1, 7.5)
        async with admission.slot():
            with pytest.raises(OverloadedError, match=r"waited 7\.5 s") as caught:
                async with admission.slot():
                    pass
            assert counts(admission) == (1, 0)
        assert asyncio.get_running_loop().time() == 7.5
        return caught.value

    assert simulated_time.run(wait()).retry_after_ms is not None


async def hint_after(service_s: float) -> int:
    """The hint of a router whose requests take so long."""
    now_s = 0.0
    admission = Admission(1, 0, 30.0, lambda: now_s)
    for _ in range(200):
        async with admission.slot():
            now_s += service_s
    return admission.retry_after_ms()


@pytest.mark.parametrize(("service_s", "expected_ms"), [(0.0, 100), (5.0, 5000), (3600.0, 30_000)])
async def test_the_retry_hint_follows_the_recent_pace_within_its_bounds(service_s: float, expected_ms: int) -> None:
    assert await hint_after(service_s) == pytest.approx(expected_ms, rel=0.01)
