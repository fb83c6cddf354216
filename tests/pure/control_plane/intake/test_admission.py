"""Slots and the queue for them: bounded, fair, and nothing is lost when a waiter leaves."""

import asyncio
import random
from collections import Counter

import pytest

from cluster_core.errors import OverloadedError
from control_plane.intake.admission import Admission, Claimant
from tests import simulated_time


class Holder:
    """A request that holds a slot until it is told to leave."""

    def __init__(self, admission: Admission, tenant: str = "", priority: int = 0, tokens: int = 1) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.claimant = Claimant(priority, tenant)
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        async with admission.slot(self.claimant, self.tokens):
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


# Tenants.


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


async def test_a_free_slot_goes_to_the_tenant_that_has_had_the_fewest() -> None:
    admission = Admission(2, 100, 30.0)
    many = [Holder(admission, "many") for _ in range(20)]
    await settle()
    few = [Holder(admission, "few") for _ in range(2)]
    assert await entered(many + few) == ["many", "many"]
    await many[0].done()
    assert await entered(few) == ["few"]
    await many[1].done()
    assert await entered(few) == ["few"], "now both have one, and the other has waited longer"
    await few[0].done()
    assert await entered(few) == ["few", "few"]
    await finish(many + few)
    assert counts(admission) == (0, 0)


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


async def test_tenants_take_turns_where_there_is_one_slot() -> None:
    admission = Admission(1, 100, 30.0)
    holders = [Holder(admission, tenant) for tenant in "aaaaaabbbc"]
    assert await order_of(admission, holders) == "abcababaaa"


async def test_tokens_count_and_not_requests() -> None:
    admission = Admission(1, 100, 30.0, at_once)
    holders = [Holder(admission, "a", tokens=1000) for _ in range(3)]
    holders += [Holder(admission, "b", tokens=250) for _ in range(10)]
    assert await order_of(admission, holders) == "abbbbabbbbabb"


async def test_weights_divide_what_is_waited_for() -> None:
    admission = Admission(1, 100, 30.0, at_once, weight_of=lambda tenant: {"a": 3.0, "b": 1.0}[tenant])
    holders = [Holder(admission, tenant, tokens=300) for tenant in "ab" * 12]
    order = await order_of(admission, holders)
    assert order[:16].count("a") == 12
    assert order[16:] == "b" * 8


async def test_what_a_request_did_not_take_is_given_back_to_its_tenant() -> None:
    admission = Admission(1, 100, 30.0, at_once)
    async with admission.slot(Claimant(tenant="a"), 30_000) as slot:
        waiting = [Holder(admission, "b", tokens=100) for _ in range(4)] + [Holder(admission, "a", tokens=100)]
        await settle()
        slot.tokens = 150
    assert await order_of(admission, waiting) == "bbabb"


async def test_a_slot_that_nobody_took_costs_nothing() -> None:
    admission = Admission(1, 100, 30.0, at_once)
    slot = await admission.take(Claimant(tenant="c"))
    gone = Holder(admission, "a", tokens=30_000)
    await settle()
    waiting = [Holder(admission, tenant, tokens=100) for tenant in "bbba"]
    await settle()
    # In the same turn, before who got the slot has run.
    slot.release()
    gone.task.cancel()
    assert await order_of(admission, waiting) == "babb"


@pytest.mark.parametrize("takes_time", [True, False])
async def test_who_holds_slots_for_long_has_had_the_tokens_of_that_time(takes_time: bool) -> None:
    """a has few tokens, and takes fifteen times as long for each request: a client that reads slowly."""
    now_s = 0.0
    admission = Admission(1, 100, 30.0, lambda: now_s)
    holders = [Holder(admission, tenant, tokens={"a": 64, "b": 1024}[tenant]) for tenant in "ab" * 40]
    order, held_s = "", {"a": 30.0, "b": 2.0}
    for _ in range(40):
        await settle()
        (running,) = [holder for holder in holders if holder.entered.is_set() and not holder.task.done()]
        order += running.tenant
        now_s += held_s[running.tenant] * takes_time
        await running.done()
    # By tokens alone it is one of b to sixteen of a.
    assert order.count("b") >= 10 if takes_time else order.count("b") <= 3
    await finish(holders)
    admission.check_invariants()


async def test_priorities_have_an_order_each() -> None:
    """What a tenant had of the first does not count in the second, and the first goes first."""
    admission = Admission(1, 100, 30.0, at_once)
    running = Holder(admission, "a", tokens=10_000)
    await settle()
    waiting = [Holder(admission, tenant, priority, 100) for tenant, priority in (("a", 1), ("b", 1), ("a", 0))]
    await settle()
    await running.done()
    order = []
    for _ in waiting:
        await settle()
        (running,) = [holder for holder in waiting if holder.entered.is_set() and not holder.task.done()]
        order.append((running.tenant, running.claimant.priority))
        await running.done()
    assert order == [("a", 0), ("a", 1), ("b", 1)]
    admission.check_invariants()


async def test_a_full_queue_is_shared_by_weight_and_has_one_place_for_each() -> None:
    admission = Admission(1, 4, 30.0, weight_of=lambda tenant: {"heavy": 3.0, "light": 0.01, "new": 1.0}[tenant])
    held = [Holder(admission, "heavy") for _ in range(4)] + [Holder(admission, "light")]
    await settle()
    with pytest.raises(OverloadedError, match="more are not taken"):
        async with admission.slot(Claimant(tenant="new")):
            pass
    with pytest.raises(OverloadedError, match="more are not taken"):
        async with admission.slot(Claimant(tenant="light")):
            pass
    assert counts(admission) == (1, 4)
    await finish(held)
    assert counts(admission) == (0, 0)
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


@pytest.mark.parametrize("seed", range(20))
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
            holders.append(Holder(admission, rng.choice("aaaabc"), rng.choice((-1, 0, 0, 2))))
        elif kind < 0.85:
            rng.choice(living).leave.set()
        else:
            rng.choice(living).task.cancel()
        if rng.random() < 0.5:
            continue
        await settle()
        living = [holder for holder in holders if not holder.task.done()]
        running = Counter(holder.tenant for holder in living if holder.entered.is_set())
        waiting = Counter(holder.tenant for holder in living if not holder.entered.is_set())
        assert counts(admission) == (running.total(), waiting.total())
        admission.check_invariants()
        assert running.total() <= most and waiting.total() <= queue
        own = max(1, int(most * share))
        assert all(count <= own for count in running.values())
        best_effort = sum(holder.claimant.is_best_effort for holder in living if holder.entered.is_set())
        has_room = best_effort < max(1, int(most * spare))
        assert best_effort <= max(1, int(most * spare))
        may_run = [
            holder
            for holder in living
            if not holder.entered.is_set() and (has_room or not holder.claimant.is_best_effort)
        ]
        if running.total() < most:
            assert all(running[holder.tenant] == own for holder in may_run), (
                "a slot is free, and somebody who may have it waits"
            )
    await finish(holders)
    assert counts(admission) == (0, 0)
