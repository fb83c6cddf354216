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


async def test_choices_that_end_apart_give_their_places_back_one_by_one() -> None:
    admission = Admission(4, 10, 30.0)
    slot = await admission.take(Claimant(0, "a"), tokens=400, slots=4)
    waits = [Holder(admission, name) for name in "bc"]
    assert await entered(waits) == []
    for left, names in ((3, ["b"]), (2, ["b", "c"])):
        slot.choice_ended()
        assert await entered(waits) == names
        assert admission.in_flight == left + len(names)
    await finish(waits)
    for _ in range(5):
        slot.choice_ended()
    assert admission.in_flight == 1, "the last one is there until all has ended"
    slot.release()
    slot.choice_ended()
    slot.release()
    assert counts(admission) == (0, 0)
    admission.check_invariants()


async def test_choices_that_ended_early_cost_no_more_than_the_time_that_they_took() -> None:
    """One answer that takes ten times as long as the other three, and a request for each of them."""
    now_s = 0.0
    together, apart = (Admission(8, 10, 30.0, now_s=lambda: now_s) for _ in range(2))
    for admission in (together, apart):
        # The pace: a hundred tokens a second.
        paced = [await admission.take(Claimant(0, "x"), 100) for _ in range(4)]
        now_s += 1.0
        for each in paced:
            each.release()
    for admission in (together, apart):
        await admission.take(Claimant(0, "who is there all the time"), 1)
    choices = await together.take(Claimant(0, "a"), 4, slots=4)
    alone = [await apart.take(Claimant(0, "a"), 1) for _ in range(4)]
    now_s += 1.0
    for each in alone[1:]:
        choices.choice_ended()
        each.release()
    now_s += 9.0
    choices.release()
    alone[0].release()
    # What a tenant has had is seen by who is next, and told to nobody.
    had = [admission._shares.start(Claimant(0, "a")) for admission in (together, apart)]
    assert had[1] > 300 and had[0] < 1.2 * had[1]
