"""What keeps its blocks while tenants take turns, and what counts as a turn."""

from collections import Counter
from math import inf

import pytest

from cluster_core.engine_jobs import NOBODY, TenantShare
from cluster_core.tenant_shares import Claimant
from prefill_worker.partial_budget import PartialBudget
from prefill_worker.planning import plan_step
from prefill_worker.policies import Contender, Tenure
from prefill_worker.prompt_turns import PromptTurns
from prefill_worker.survival import Slice
from tests.planting import planted

BLOCK = 16
A, B = TenantShare("a"), TenantShare("b")


def contender(
    name: str, tokens: int, held: int = 0, whose: TenantShare = A, *, complete: bool = True, decodes: bool = False
) -> Contender:
    """It holds what is computed of it."""
    made = Contender(name, complete, 0.0, 0.0, inf, held * BLOCK, Tenure.RUNNING, 0)
    made.remaining_tokens, made.known_tokens = tokens - held * BLOCK, tokens
    made.held_blocks, made.tenant, made.decodes = held, whose, decodes
    return made


def names(contenders: list[Contender]) -> list[str]:
    return [each.request_id for each in contenders]


def begun(*contenders: Contender) -> list[str]:
    turns = PromptTurns()
    return names(turns.begun(turns.order(contenders)))


@pytest.mark.parametrize("whose", [NOBODY, A])
def test_nothing_is_kept_where_one_tenant_is_alone(whose: TenantShare) -> None:
    """Sessions of services without keys go by their policy alone."""
    assert begun(contender("begun", 96, 2, whose), contender("new", 96, 0, whose)) == []
    other_priority = contender("batch", 96, 1, B)
    other_priority.priority = 1
    assert begun(contender("begun", 96, 2, whose), other_priority) == []
    assert begun(contender("begun", 96, 2, whose), contender("new", 96, 0, B)) == ["begun"]


def test_blocks_that_are_kept_from_ones_own_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def granted() -> list[str]:
        turns, old, new = PromptTurns(), contender("old", 96, 2), contender("new", 96)
        ordered = turns.order([new, old])
        plan = plan_step(ordered, 1000, 10, 9, BLOCK, begun=turns.begun(ordered))
        return names([grant.contender for grant in plan.grants])

    assert granted() == ["new"], "the policy's order, which puts it first"
    # A planted bug: it does not matter how many tenants are there.
    planted(monkeypatch, PromptTurns, "begun", lambda self, by_policy: [each for each in by_policy if each.held_blocks])
    assert granted() == ["old"]


def test_who_waits_for_one_token_needs_what_it_holds_as_well() -> None:
    assert begun(contender("one left", 33, 2, A), contender("begun", 96, 2, B)) == ["one left", "begun"]
    assert begun(contender("decodes", 33, 2, A, decodes=True), contender("begun", 96, 2, B)) == []


def test_what_takes_input_keeps_its_blocks_while_it_has_tokens_to_compute() -> None:
    """Whole prompts of others would take them again and again: they always come."""
    for complete in (True, False):
        session, new = contender("session", 96, 2, complete=complete), contender("new", 96, 0, B)
        plan = plan_step([new, session], 1000, 10, 9, BLOCK, begun=[session])
        assert names([grant.contender for grant in plan.grants]) == ["session"]
    session.remaining_tokens = 0
    turns = PromptTurns()
    kept = turns.begun(turns.order([new, session]))
    assert kept == [], "it has computed all there is"
    plan = plan_step([new, session], 1000, 6, 9, BLOCK, begun=kept)
    assert names([grant.contender for grant in plan.grants]) == ["new"]


@pytest.mark.parametrize(("survival", "expected"), [(1.0, ["session"]), (0.0, ["new"])])
def test_a_session_that_is_held_back_keeps_nothing_from_whole_prompts(survival: float, expected: list[str]) -> None:
    """Nobody was computed for as long as it was held: it was not, and they had to leave it its blocks."""
    session, new = contender("session", 96, 2, complete=False), contender("new", 96, 0, B)
    budget = PartialBudget(80.0, lambda name, first, count: (Slice(count, survival),), price=0.005)
    plan = plan_step([new, session], 1000, 10, 9, BLOCK, begun=[session], partial=budget)
    assert names([grant.contender for grant in plan.grants]) == expected


def prompt_tokens(decoding: int, steps: int = 200) -> Counter[str]:
    """What prompts of two tenants get of steps of 64 tokens, while one decodes so much beside them."""
    turns, had = PromptTurns(), Counter[str]()
    for _ in range(steps):
        # What it decodes has drafts to verify, too.
        answering = [contender(f"d{number}", 3, 0, A, decodes=True) for number in range(decoding)]
        prompts = [contender("a", 1000, 0, A), contender("b", 1000, 0, B)]
        first = names([each for each in turns.order([*answering, *prompts]) if not each.decodes])[0]
        turns.computed([*answering, *prompts], {first: 64} | {each.request_id: 3 for each in answering})
        turns.check_invariants()
        had[first] += 64
    return had


@pytest.mark.parametrize("decoding", [0, 20, 90])
def test_what_a_tenant_decodes_is_not_charged_as_prompts(decoding: int) -> None:
    had = prompt_tokens(decoding)
    assert abs(had["a"] - had["b"]) <= 64


def test_who_only_decodes_has_no_turn_and_is_charged_nothing() -> None:
    turns = PromptTurns()
    turns.order([contender("d", 3, 0, A, decodes=True), contender("b", 96, 0, B)])
    turns.computed_alone(Claimant(0, "a"), 1.0, 5000)
    turns.computed_alone(Claimant(0, "a"), 1.0, 0)
    turns.check_invariants()
    # It is where the others are, not behind them by what it once had.
    order = turns.order([contender("a", 96, 0, A), contender("b", 96, 0, B)])
    assert names(order) == ["a", "b"]


class Priority(int):
    """Counts comparisons."""

    compared = 0

    def __le__(self, other: int) -> bool:
        Priority.compared += 1
        return int(self) <= int(other)


def test_who_finds_no_room_is_compared_with_those_that_begin_as_it_does_not_with_all_that_have_begun() -> None:
    running = [contender(f"r{number}", 96, 2) for number in range(200)]
    waiting = [contender(f"w{number}", 96, 0, B) for number in range(300)]
    for number, each in enumerate((*running, *waiting)):
        # Each holds blocks of its own.
        each.priority, each.first_block = Priority(), number if each.held_blocks else -1
    Priority.compared = 0
    plan = plan_step([*waiting, *running], 100, 6 * len(running), 999, BLOCK, begun=running)
    assert len(plan.kept) == len(running) - len(plan.grants)
    assert Priority.compared <= 4 * len(waiting)
