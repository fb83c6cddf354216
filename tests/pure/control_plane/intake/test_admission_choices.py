"""Requests of several choices at the slots: each choice counts, and no request waits for many slots at once."""

from cluster_core.tenant_shares import Claimant
from control_plane.intake.admission import Admission
from tests.pure.control_plane.intake.slot_holders import Holder, at_once, counts, entered, finish, order_of, settle


async def test_each_choice_takes_a_slot_and_all_come_back_together() -> None:
    admission = Admission(4, 10, 30.0)
    choices, one, waits = Holder(admission, "a", slots=3), Holder(admission, "b"), Holder(admission, "c")
    assert await entered([choices, one, waits]) == ["a", "b"]
    assert counts(admission) == (4, 1)
    admission.check_invariants()
    await choices.done()
    assert await entered([waits]) == ["c"]
    await finish([one, waits])
    assert counts(admission) == (0, 0)
    admission.check_invariants()


async def test_a_tenant_has_no_more_answers_by_asking_for_several_at_once() -> None:
    admission = Admission(64, 100, 30.0, tenant_share=0.5)
    many = [Holder(admission, "many", slots=8) for _ in range(10)]
    assert await entered(many) == ["many"] * 4
    assert admission.in_flight == 32
    few = Holder(admission, "few")
    assert await entered([few]) == ["few"]
    await finish([*many, few])


async def test_best_effort_leaves_slots_for_the_others_whatever_choices_it_asks_for() -> None:
    admission = Admission(16, 100, 30.0, best_effort_share=0.5)
    batch = [Holder(admission, "a", 1, slots=4) for _ in range(4)]
    assert await entered(batch) == ["a"] * 2
    others = [Holder(admission, "b") for _ in range(8)]
    assert await entered(others) == ["b"] * 8
    await finish([*batch, *others])
    admission.check_invariants()


async def test_one_that_wants_more_slots_than_there_are_is_answered_and_the_others_wait_for_what_it_owes() -> None:
    admission = Admission(2, 10, 30.0)
    one, large = Holder(admission, "a"), Holder(admission, "b", slots=16)
    assert await entered([one, large]) == ["a", "b"], "it waits for one slot, not for all of them"
    assert admission.in_flight == 17
    waits = Holder(admission, "c")
    await one.done()
    assert await entered([waits]) == []
    await large.done()
    assert await entered([waits]) == ["c"]
    await finish([waits])
    assert counts(admission) == (0, 0)


async def test_one_that_is_cancelled_as_it_gets_its_slots_keeps_none_of_them() -> None:
    admission = Admission(2, 10, 30.0)
    holder, waiter = Holder(admission, "a", slots=2), Holder(admission, "b", slots=5)
    await settle()
    holder.leave.set()
    await holder.task
    waiter.task.cancel()
    await settle()
    assert counts(admission) == (0, 0)
    admission.check_invariants()
    slot = await admission.take(Claimant(0, "b"))
    assert admission.in_flight == 1
    slot.release()


async def test_several_choices_cost_a_tenant_as_much_as_as_many_requests() -> None:
    """Of one choice against four: four of the one tenant's requests for each of the other's."""
    admission = Admission(1, 100, 30.0, at_once)
    running = Holder(admission, "x")
    await settle()
    waiting = [Holder(admission, "a", slots=4) for _ in range(3)] + [Holder(admission, "b") for _ in range(12)]
    await settle()
    await running.done()
    order = await order_of(admission, waiting)
    assert order.count("a") == 3 and order[:11].count("a") == 3 and order[:6].count("a") == 2
