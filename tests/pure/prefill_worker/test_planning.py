"""Phase 1 grants only what fits, in priority order; Phase 2 takes from the lowest priority that was left out."""

import copy
import dataclasses
import math
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.partial_budget import PartialBudget
from prefill_worker.planning import StepPlan, footprint_blocks, plan_step, victims
from prefill_worker.policies import Contender, Tenure
from prefill_worker.survival import Slice

BLOCK = 4


def contender(
    name: str, remaining: int, known: int | None = None, held: int = 0, *, evictable: bool = True
) -> Contender:
    known = remaining if known is None else known
    return Contender(
        name, False, 0.0, 0.0, math.inf, known - remaining, Tenure.WAITING, 0, remaining, known, held, evictable
    )


def of_adapter(name: str, adapter: int, *, waiting_since_s: float = math.inf) -> Contender:
    made = contender(name, 4)
    made.adapter, made.waiting_since_s = adapter, waiting_since_s
    return made


def granted(plan: StepPlan) -> list[tuple[str, int]]:
    return [(each.contender.request_id, each.tokens) for each in plan.grants]


def left_out(plan: StepPlan) -> list[str]:
    return [each.request_id for each in plan.left_out]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Contender], int, int, int]:
    """Candidates in priority order, token budget, capacity, most scheduled. What cannot be taken fits the pool."""
    contenders = []
    for index in range(draw(st.integers(0, 12))):
        known = draw(st.integers(0, 40))
        remaining = draw(st.integers(0, known))
        held = draw(st.integers(0, -(-known // BLOCK)))
        contenders.append(contender(f"r{index}", remaining, known, held, evictable=draw(st.booleans())))
    fixed = sum(each.held_blocks for each in contenders if not each.evictable)
    return contenders, draw(st.integers(0, 60)), fixed + draw(st.integers(0, 20)), draw(st.integers(0, 8))


def charge_blocks(each: Contender) -> int:
    """What a grant adds to what is charged for blocks that nobody can take."""
    footprint = footprint_blocks(each, BLOCK)
    return footprint if each.evictable else max(0, footprint - each.held_blocks)


@given(case=cases())
def test_plan_stays_within_budget_slots_and_pool(case: tuple[list[Contender], int, int, int]) -> None:
    contenders, budget, capacity, most = case
    plan = plan_step(contenders, budget, capacity, most, BLOCK)
    assert sum(each.tokens for each in plan.grants) <= budget
    assert len(plan.grants) <= most
    assert all(0 < each.tokens <= each.contender.remaining_tokens for each in plan.grants)
    fixed = sum(each.held_blocks for each in contenders if not each.evictable)
    assert fixed + sum(charge_blocks(each.contender) for each in plan.grants) <= capacity


@given(case=cases())
def test_every_contender_is_granted_or_left_out_once_and_in_order(case: tuple[list[Contender], int, int, int]) -> None:
    contenders, budget, capacity, most = case
    plan = plan_step(contenders, budget, capacity, most, BLOCK)
    takers = [each.contender for each in plan.grants]
    place = {id(each): index for index, each in enumerate(contenders)}
    for group in (takers, plan.left_out):
        assert [place[id(each)] for each in group] == sorted(place[id(each)] for each in group)
    assert sorted(place[id(each)] for each in takers + plan.left_out) == list(range(len(contenders)))


@given(case=cases())
def test_nobody_is_passed_over_that_could_have_been_served(case: tuple[list[Contender], int, int, int]) -> None:
    """Replays the grants above each one left out: what was left then, was not enough for it."""
    contenders, budget, capacity, most = case
    plan = plan_step(contenders, budget, capacity, most, BLOCK)
    tokens = {id(each.contender): each.tokens for each in plan.grants}
    room = capacity - sum(each.held_blocks for each in contenders if not each.evictable)
    served = 0
    for each in contenders:
        if id(each) not in tokens:
            parked, full = each.remaining_tokens == 0, charge_blocks(each) > room
            assert parked or full or budget == 0 or served == most
            continue
        assert tokens[id(each)] == min(each.remaining_tokens, budget)
        budget -= tokens[id(each)]
        room -= charge_blocks(each)
        served += 1


@given(case=cases())
def test_planning_changes_nothing(case: tuple[list[Contender], int, int, int]) -> None:
    contenders, budget, capacity, most = case
    before = [copy.copy(each) for each in contenders]
    list(victims(plan_step(contenders, budget, capacity, most, BLOCK).left_out))
    for each, was in zip(contenders, before, strict=True):
        assert all(getattr(each, part.name) == getattr(was, part.name) for part in fields(Contender))


@given(case=cases())
def test_victims_hold_blocks_that_can_be_taken_and_come_lowest_first(
    case: tuple[list[Contender], int, int, int],
) -> None:
    contenders, budget, capacity, most = case
    plan = plan_step(contenders, budget, capacity, most, BLOCK)
    found = list(victims(plan.left_out))
    assert all(each.held_blocks > 0 and each.evictable for each in found)
    assert [id(each) for each in reversed(found)] == [
        id(each) for each in plan.left_out if each.held_blocks > 0 and each.evictable
    ]


@given(case=cases())
def test_blocks_of_all_victims_are_enough_for_every_grant(case: tuple[list[Contender], int, int, int]) -> None:
    """With every victim preempted, what the granted ones miss fits what is free."""
    contenders, budget, capacity, most = case
    plan = plan_step(contenders, budget, capacity, most, BLOCK)
    gone = {id(each) for each in victims(plan.left_out)}
    held = sum(each.held_blocks for each in contenders if id(each) not in gone)
    missing = sum(footprint_blocks(each.contender, BLOCK) - each.contender.held_blocks for each in plan.grants)
    assert held + missing <= capacity


def test_blocks_held_by_a_lower_priority_do_not_stand_in_the_way() -> None:
    plan = plan_step([contender("high", 16), contender("low", 4, known=16, held=3)], 64, 4, 8, BLOCK)
    assert granted(plan) == [("high", 16)]
    assert [each.request_id for each in victims(plan.left_out)] == ["low"]


def test_infeasible_one_is_skipped_and_not_waited_for() -> None:
    plan = plan_step([contender("huge", 400), contender("small", 4)], 64, 4, 8, BLOCK)
    assert granted(plan) == [("small", 4)]
    assert left_out(plan) == ["huge"]


def test_whole_known_prompt_is_charged_although_the_budget_covers_a_part() -> None:
    plan = plan_step([contender("long", 16), contender("other", 4)], 8, 4, 8, BLOCK)
    assert granted(plan) == [("long", 8)]
    plan = plan_step([contender("long", 16), contender("other", 4)], 64, 4, 8, BLOCK)
    assert left_out(plan) == ["other"]


def test_parked_session_takes_no_budget_and_no_blocks_and_may_be_preempted() -> None:
    plan = plan_step([contender("parked", 0, known=16, held=4), contender("active", 8)], 8, 4, 8, BLOCK)
    assert granted(plan) == [("active", 8)]
    assert [each.request_id for each in victims(plan.left_out)] == ["parked"]


def test_blocks_that_cannot_be_taken_are_charged_before_the_highest_priority() -> None:
    loading = contender("loading", 0, known=12, held=3, evictable=False)
    plan = plan_step([contender("high", 8), loading], 64, 4, 8, BLOCK)
    assert granted(plan) == []
    assert list(victims(plan.left_out)) == []


def test_victims_are_the_lowest_priorities_first_and_holders_only() -> None:
    group = [contender("a", 4, held=1), contender("b", 4), contender("c", 4, held=1)]
    assert [each.request_id for each in victims(group)] == ["c", "a"]


def test_blocks_that_two_share_are_charged_once() -> None:
    holder, sharer = contender("holder", 4, known=16, held=4), contender("sharer", 4, known=20)
    holder.first_block = sharer.first_block = 7
    holder.shared_blocks = sharer.shared_blocks = 3
    assert len(plan_step([holder, sharer], 64, 6, 8, BLOCK).grants) == 2
    assert len(plan_step([holder, sharer], 64, 5, 8, BLOCK).grants) == 1


def test_behind_one_that_is_overdue_and_does_not_fit_only_holders_are_served() -> None:
    overdue = contender("overdue", 40)
    overdue.waiting_since_s = 3.0
    behind = [overdue, contender("newcomer", 4), contender("holder", 4, known=8, held=1)]
    assert granted(plan_step(behind, 64, 4, 8, BLOCK, overdue_since_s=2.0)) == [("newcomer", 4), ("holder", 4)]
    assert granted(plan_step(behind, 64, 4, 8, BLOCK, overdue_since_s=3.0)) == [("holder", 4)]


def test_a_step_has_no_more_adapters_than_places_and_the_first_in_order_say_which() -> None:
    contenders = [of_adapter(*each) for each in (("a", 2), ("b", 0), ("c", 1), ("d", 2), ("e", 3), ("f", 1))]
    plan = plan_step(contenders, 100, 100, 10, BLOCK, most_adapters=2)
    assert [name for name, _ in granted(plan)] == ["a", "b", "c", "d", "f"]
    plan = plan_step(contenders, 100, 100, 10, BLOCK, most_adapters=1)
    assert [name for name, _ in granted(plan)] == ["a", "b", "d"]


def test_behind_one_that_is_overdue_for_its_adapter_nobody_new_comes() -> None:
    contenders = [of_adapter("a", 1), of_adapter("b", 2, waiting_since_s=1.0), of_adapter("c", 1)]
    held = contender("d", 4, known=8, held=1)
    plan = plan_step([*contenders, held], 100, 100, 10, BLOCK, overdue_since_s=2.0, most_adapters=1)
    assert [name for name, _ in granted(plan)] == ["a", "d"]
    plan = plan_step([*contenders, held], 100, 100, 10, BLOCK, overdue_since_s=0.5, most_adapters=1)
    assert [name for name, _ in granted(plan)] == ["a", "c", "d"]


def whole(name: str, tokens: int) -> Contender:
    return dataclasses.replace(contender(name, tokens), complete=True)


def partial(name: str, tokens: int) -> Contender:
    return dataclasses.replace(contender(name, tokens), complete=False)


def bound_of(tokens: float) -> PartialBudget:
    return PartialBudget(tokens, lambda name, first, count: (Slice(count, 1.0),))


def test_sessions_that_take_input_get_little_and_nothing_beside_a_whole_prompt() -> None:
    sessions = [partial("first", 30), partial("second", 30)]

    alone = plan_step(sessions, 100, 1000, 10, 16, partial=bound_of(40))
    beside = plan_step([whole("whole", 40), *sessions], 100, 1000, 10, 16, partial=bound_of(40))
    unbound = plan_step([whole("whole", 40), *sessions], 100, 1000, 10, 16)

    assert granted(alone) == [("first", 30), ("second", 10)]
    assert granted(beside) == [("whole", 40)]
    assert granted(unbound) == [("whole", 40), ("first", 30), ("second", 30)]


def test_a_whole_prompt_that_does_not_fit_keeps_nobody_from_computing() -> None:
    plan = plan_step([whole("whole", 4000), partial("session", 30)], 100, 10, 10, 16, partial=bound_of(40))

    assert granted(plan) == [("session", 30)]


def test_what_does_not_fit_leaves_its_share_to_those_behind_it() -> None:
    plan = plan_step([partial("large", 4000), partial("small", 30)], 100, 10, 10, 16, partial=bound_of(40))

    assert granted(plan) == [("small", 30)]
