"""Slots and the queue for them: bounded, fair, and nothing is lost when a waiter leaves."""

import asyncio
import random
from collections import Counter

import pytest

from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant
from control_plane.intake.admission import Admission
from tests import simulated_time
from tests.examples import seeds
from tests.pure.control_plane.intake.slot_holders import Holder, counts, entered, finish, settle


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


# Tenants.


async def test_a_full_queue_takes_who_has_fewer_waiting_in_place_of_the_latest_of_who_has_most() -> None:
    admission = Admission(1, 4, 30.0)
    many = [Holder(admission, "many") for _ in range(5)]
    await settle()
    few = Holder(admission, "few")
    await settle()
    assert counts(admission) == (1, 4)
    with pytest.raises(OverloadedError, match="most of them of this tenant") as raised:
        await many[-1].task
    assert raised.value.retry_after_ms is not None
    with pytest.raises(OverloadedError, match="more are not taken"):
        async with admission.slot(Claimant(tenant="many")):
            pass
    await many[0].done()
    assert await entered([few]) == ["few"]
    await finish([*many, few])
    assert counts(admission) == (0, 0)


async def test_a_tenant_that_would_have_as_many_waiting_displaces_nobody() -> None:
    admission = Admission(1, 2, 30.0)
    held = [Holder(admission, "a"), Holder(admission, "a"), Holder(admission, "b")]
    await settle()
    for tenant in ("a", "b", "c"):
        with pytest.raises(OverloadedError, match="more are not taken"):
            async with admission.slot(Claimant(tenant=tenant)):
                pass
    await finish(held)


async def test_sessions_that_go_on_stand_beside_a_full_queue_and_are_never_dropped() -> None:
    """However many there are they keep nobody out: neither a lower number nor another tenant."""
    admission = Admission(1, 2, 30.0)
    running = Holder(admission)
    sessions = [Holder(admission, "sessions", 5, goes_on=True) for _ in range(4)]
    await settle()
    new = [Holder(admission, "few", 5), Holder(admission, "sessions", 5)]
    await settle()
    assert counts(admission) == (1, 6)
    with pytest.raises(OverloadedError, match="1 requests run and 6 wait"):
        await admission.take(Claimant(5, "sessions"))
    first = Holder(admission)
    late = Holder(admission, "sessions", 5, goes_on=True)
    await settle()
    with pytest.raises(OverloadedError, match="the latest make room"):
        await asyncio.wait_for(asyncio.gather(*(each.task for each in new)), 1.0)
    assert counts(admission) == (1, 7)
    admission.check_invariants()
    await finish([running, first, late, *sessions, *new])
    assert all(session.task.exception() is None for session in (*sessions, late, first))
    assert counts(admission) == (0, 0)


async def test_without_a_queue_a_session_that_goes_on_waits_all_the_same() -> None:
    admission = Admission(1, 0, 30.0)
    running, session = Holder(admission), Holder(admission, goes_on=True)
    await settle()
    with pytest.raises(OverloadedError, match="more are not taken"):
        await admission.take(Claimant(-1))
    await running.done()
    assert await entered([session]) == [""]
    await finish([session])


async def test_a_new_request_makes_room_and_not_the_session_that_came_later() -> None:
    admission = Admission(1, 1, 30.0)
    running, new = Holder(admission), Holder(admission, priority=5)
    await settle()
    session = Holder(admission, priority=5, goes_on=True)
    await settle()
    first = Holder(admission)
    await settle()
    with pytest.raises(OverloadedError, match="the latest make room"):
        await new.task
    assert counts(admission) == (1, 2)
    await finish([running, session, first])
    admission.check_invariants()


async def test_no_tenant_has_more_than_its_share_though_slots_are_free() -> None:
    admission = Admission(4, 10, 30.0, tenant_share=0.5)
    many = [Holder(admission, "many") for _ in range(6)]
    assert await entered(many) == ["many"] * 2
    assert counts(admission) == (2, 4)
    few = Holder(admission, "few")
    assert await entered([few]) == ["few"], "who is below its share waits behind nobody"
    await many[0].done()
    assert await entered(many) == ["many"] * 3
    await finish([*many, few])
    assert counts(admission) == (0, 0)


async def test_a_waiter_that_is_cancelled_before_it_could_leave_gets_no_slot() -> None:
    admission = Admission(1, 10, 30.0)
    holder, waiter, last = Holder(admission, "a"), Holder(admission, "b"), Holder(admission, "c")
    await settle()
    waiter.task.cancel()
    # In the same turn, before the cancelled one has run.
    holder.leave.set()
    holder.task.cancel()
    await settle()
    assert last.entered.is_set() and counts(admission) == (1, 0)
    await last.done()
    assert counts(admission) == (0, 0)


async def test_the_lowest_number_goes_first_whoever_waits_longer() -> None:
    admission = Admission(1, 100, 30.0)
    running = Holder(admission, "a")
    await settle()
    waiting = [Holder(admission, tenant, priority) for tenant, priority in (("a", 5), ("b", 1), ("a", 0), ("b", -3))]
    order = []
    await settle()
    await running.done()
    for _ in waiting:
        await settle()
        (running,) = [holder for holder in waiting if holder.entered.is_set() and not holder.task.done()]
        order.append(running.claimant.priority)
        await running.done()
    assert order == [-3, 0, 1, 5]
    assert counts(admission) == (0, 0)
    admission.check_invariants()


async def test_a_full_queue_takes_a_lower_number_in_place_of_the_latest_of_the_highest() -> None:
    admission = Admission(1, 3, 30.0)
    held = [Holder(admission)]
    await settle()
    batch = [Holder(admission, tenant, 1) for tenant in ("a", "b", "b")]
    await settle()
    with pytest.raises(OverloadedError, match="more are not taken"):
        async with admission.slot(Claimant(2)):
            pass
    first = Holder(admission)
    await settle()
    with pytest.raises(OverloadedError, match="a lower priority number") as raised:
        await batch[-1].task
    assert raised.value.retry_after_ms is not None
    assert counts(admission) == (1, 3), "who has most waiting gave room, and one of each is left"
    await held[0].done()
    assert await entered([first]) == [""]
    await finish([first, *batch])
    assert counts(admission) == (0, 0)


async def test_best_effort_leaves_slots_for_the_others_though_they_are_free() -> None:
    admission = Admission(4, 10, 30.0, best_effort_share=0.5)
    batch = [Holder(admission, "a", 1) for _ in range(4)]
    assert await entered(batch) == ["a", "a"]
    others = [Holder(admission, "b") for _ in range(3)]
    assert await entered(others) == ["b", "b"], "neither waits for one of the batch"
    await others[0].done()
    assert await entered(others) == ["b"] * 3, "and the third goes before the rest of it"
    await batch[0].done()
    assert await entered(batch) == ["a"] * 3
    await finish([*batch, *others])
    assert counts(admission) == (0, 0)
    admission.check_invariants()


@pytest.mark.parametrize("seed", seeds(20, few=6))
async def test_nothing_is_lost_and_nobody_waits_for_nothing_whatever_comes(seed: int) -> None:
    """Random arrivals, ends and cancellations; after each, what has to hold."""
    rng = random.Random(seed)
    most, queue, share = rng.randrange(1, 6), rng.randrange(0, 8), rng.choice((1.0, 0.5, 0.3))
    spare = rng.choice((1.0, 0.5))
    admission = Admission(most, queue, 30.0, tenant_share=share, best_effort_share=spare)
    holders: list[Holder] = []
    for _ in range(300):
        kind = rng.random()
        living = [holder for holder in holders if not holder.task.done()]
        if kind < 0.5 or not living:
            priority, slots, goes_on = rng.choice((-1, 0, 0, 2)), rng.choice((1, 1, 1, 3)), rng.random() < 0.2
            holders.append(Holder(admission, rng.choice("aaaabc"), priority, 1, slots, goes_on=goes_on))
        elif kind < 0.85:
            rng.choice(living).leave.set()
        else:
            rng.choice(living).task.cancel()
        if rng.random() < 0.5:
            continue
        await settle()
        living = [holder for holder in holders if not holder.task.done()]
        running = Counter[str]()
        for holder in living:
            running[holder.tenant] += holder.slots * holder.entered.is_set()
        waiting = Counter(holder.tenant for holder in living if not holder.entered.is_set())
        assert counts(admission) == (running.total(), waiting.total())
        admission.check_invariants()
        # The last one to begin may be short of two of its three slots.
        going_on = sum(holder.goes_on and not holder.entered.is_set() for holder in living)
        assert running.total() <= most + 2 and waiting.total() <= queue + going_on
        own = max(1, int(most * share))
        assert all(count <= own + 2 for count in running.values())
        best_effort = sum(holder.slots * holder.claimant.is_best_effort for holder in living if holder.entered.is_set())
        has_room = best_effort < max(1, int(most * spare))
        assert best_effort <= max(1, int(most * spare)) + 2
        may_run = [
            holder
            for holder in living
            if not holder.entered.is_set() and (has_room or not holder.claimant.is_best_effort)
        ]
        if running.total() < most:
            assert all(running[holder.tenant] >= own for holder in may_run), (
                "a slot is free, and somebody who may have it waits"
            )
    await finish(holders)
    assert counts(admission) == (0, 0)
