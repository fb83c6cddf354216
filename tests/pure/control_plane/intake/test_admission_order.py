"""Whose request gets a slot that is free: by tokens and weight among tenants, and each priority by itself."""

import pytest

from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant
from control_plane.intake.admission import Admission
from tests.pure.control_plane.intake.slot_holders import Holder, at_once, counts, entered, finish, order_of, settle


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


async def test_a_weight_that_changes_while_a_request_runs_is_no_credit() -> None:
    weights = {"a": 100.0, "b": 1.0}
    admission = Admission(1, 100, 30.0, at_once, weight_of=lambda tenant: weights[tenant])
    async with admission.slot(Claimant(tenant="a"), 30_000) as slot:
        waiting = [Holder(admission, tenant, tokens=100) for tenant in "ab" * 6]
        await settle()
        weights["a"] = 1.0
        slot.tokens = 100
    assert await order_of(admission, waiting) == "babababababa"


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


async def test_who_waits_for_a_share_is_not_short_of_slots() -> None:
    """Best effort has two of four slots, a tenant three."""
    admission = Admission(4, 99, 30.0, tenant_share=0.75, best_effort_share=0.5)
    holders = [Holder(admission, tenant="a", priority=1) for _ in range(9)]
    await settle()
    assert (*counts(admission), admission.short_of_slots) == (2, 7, 0)
    holders += [Holder(admission, tenant="a") for _ in range(2)]
    await settle()
    assert (*counts(admission), admission.short_of_slots) == (3, 8, 0)
    holders += [Holder(admission, tenant="b") for _ in range(3)]
    await settle()
    # All are taken: two of `b` wait for one, and what waits of `a` has its part.
    assert (*counts(admission), admission.short_of_slots) == (4, 10, 2)
    await finish(holders)


async def test_without_shares_all_who_wait_are_short_of_slots() -> None:
    admission = Admission(2, 99, 30.0)
    holders = [Holder(admission, tenant="a", priority=1) for _ in range(5)]
    await settle()
    assert (*counts(admission), admission.short_of_slots) == (2, 3, 3)
    await finish(holders)
