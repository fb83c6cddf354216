"""A step computes of open sessions what brings most a second, less what it costs those who wait for the step."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.partial_budget import RATE_S, PartialBudget, WholePrompts
from prefill_worker.policies import Contender, Tenure
from prefill_worker.survival import Slice

SESSION = Contender("s", False, 0.0, 0.0, math.inf, 0, Tenure.WAITING, 0, remaining_tokens=100, known_tokens=100)
OVERDUE = dataclasses.replace(SESSION, waiting_since_s=0.0)
# A token of what any step costs for each that a step of 80 may compute.
FIXED = 20.0


def slices(*found: Slice) -> Callable[[str, int, int], Sequence[Slice]]:
    return lambda name, first, tokens: found


def cut(given: Sequence[Slice]) -> Callable[[str, int, int], Sequence[Slice]]:
    """As those of a session of which some have been computed."""

    def of(name: str, first: int, tokens: int) -> Sequence[Slice]:
        single = [each.survival for each in given for _ in range(each.tokens)][first : first + tokens]
        return [Slice(1, each) for each in single]

    return of


def brings_per_s(kept: float, tokens: float, price: float) -> float:
    """What the module's text says, in tokens."""
    took = FIXED + tokens
    return (kept - price * took**2 / 2) / took


@pytest.mark.parametrize(
    ("price", "given", "expected"),
    [
        # Nothing is known of the engine's speed, or nobody comes.
        (0.0, [Slice(100, 0.01)], 80),
        # What stays for sure is bounded by the step alone.
        (1.0, [Slice(100, 1.0)], 80),
        (1.0, [Slice(1, 1.0)], 1),
        # The root of 2 * 0.5 * 20 / 0.005 is 63.2.
        (0.005, [Slice(100, 0.5)], 43),
        (0.005, [Slice(30, 0.5)], 30),
        (0.005, [Slice(43, 0.5), Slice(57, 0.4)], 43),
        # The last of these are worth the step, and not a longer one.
        (0.005, [Slice(20, 0.5), Slice(80, 0.4)], 28),
        # The step would cost more than it brings: 0.1 <= 2 * 0.005 * 20.
        (0.005, [Slice(100, 0.19)], 0),
        (0.005, [Slice(2, 0.5)], 0),
        (0.005, [Slice(100, 0.0)], 0),
        (0.005, [], 0),
    ],
)
def test_a_step_has_what_brings_most_a_second(price: float, given: list[Slice], expected: int) -> None:
    assert PartialBudget(80.0, slices(*given), price, FIXED).most_tokens(SESSION) == expected


@given(
    survivals=st.lists(st.floats(0.0, 0.99), min_size=1, max_size=40).map(lambda drawn: sorted(drawn, reverse=True)),
    price=st.floats(0.0005, 0.05),
)
def test_no_other_number_of_tokens_brings_more(survivals: list[float], price: float) -> None:
    given = [Slice(1, each) for each in survivals]
    chosen = PartialBudget(math.inf, slices(*given), price, FIXED).most_tokens(SESSION)
    brings = [brings_per_s(sum(survivals[:tokens]), tokens, price) for tokens in range(len(survivals) + 1)]
    best = max(brings[1:])
    if chosen:
        # Whole tokens are computed: the best may be the next one.
        assert best <= max(brings[chosen : chosen + 2]) + 1e-9
        assert best >= 0
    else:
        assert best <= 1e-9 or max(brings[2:], default=-1.0) < best


def test_the_next_session_goes_on_where_the_one_before_ended() -> None:
    budget = PartialBudget(80.0, slices(Slice(30, 0.5)), 0.005, FIXED)
    assert budget.most_tokens(SESSION) == 30
    budget.granted(SESSION, 30)
    assert budget.most_tokens(SESSION) == 13
    budget.granted(SESSION, 13)
    assert budget.most_tokens(SESSION) == 0


def test_what_was_not_granted_counts_nothing() -> None:
    """The step had no room for more of the first: the second is judged by what the step has."""
    budget = PartialBudget(80.0, cut([Slice(20, 0.9), Slice(80, 0.5)]), 0.005, FIXED)
    budget.granted(SESSION, 20)
    alone = PartialBudget(80.0, cut([Slice(20, 0.9), Slice(80, 0.5)]), 0.005, FIXED).most_tokens(SESSION)
    assert budget.most_tokens(dataclasses.replace(SESSION, remaining_tokens=80)) == alone - 20


def test_nothing_is_computed_behind_a_whole_prompt() -> None:
    budget = PartialBudget(80.0, slices(Slice(100, 1.0)))
    budget.granted(dataclasses.replace(SESSION, complete=True), 10)
    assert budget.most_tokens(SESSION) == 0


def test_who_is_overdue_is_computed_whatever_it_is_worth() -> None:
    budget = PartialBudget(80.0, slices(Slice(100, 0.0)), 1.0, FIXED, overdue_since_s=0.0)
    assert budget.most_tokens(SESSION) == 0
    assert budget.most_tokens(OVERDUE) == 80
    budget.granted(OVERDUE, 50)
    assert budget.most_tokens(OVERDUE) == 30


@pytest.mark.parametrize("late", [False, True], ids=["stays for sure", "overdue"])
def test_what_stays_for_sure_has_what_is_left_of_the_step_behind_what_may_not(late: bool) -> None:
    """Its own step would have cost nothing; with the few tokens before it, it seemed to."""
    of_behind = 0.5 if late else 1.0
    budget = PartialBudget(
        500.0,
        lambda name, first, tokens: (Slice(tokens, of_behind if name == "behind" else 0.5),),
        0.005,
        FIXED,
        overdue_since_s=0.0,
    )
    unsure = dataclasses.replace(SESSION, remaining_tokens=5000)
    first = budget.most_tokens(unsure)
    assert 0 < first < 500
    budget.granted(unsure, first)
    behind = dataclasses.replace(OVERDUE if late else SESSION, request_id="behind", remaining_tokens=5000)
    assert budget.most_tokens(behind) == 500 - first


def test_a_front_that_stays_for_sure_is_computed_whatever_follows_it() -> None:
    budget = PartialBudget(80.0, cut([Slice(2, 1.0), Slice(80, 0.9)]), 0.05, FIXED)
    assert budget.most_tokens(dataclasses.replace(SESSION, known_tokens=82, remaining_tokens=82)) == 2


@given(
    found=st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=6),
    price=st.sampled_from((0.0, 0.001, 0.1)),
    tokens=st.sampled_from((16.0, 50.0, math.inf)),
    granted=st.integers(0, 60),
)
def test_no_more_than_there_is_and_than_the_step_has(
    found: list[tuple[int, float]], price: float, tokens: float, granted: int
) -> None:
    given = [Slice(*each) for each in found]
    budget = PartialBudget(tokens, slices(*given), price, FIXED)
    there = sum(each.tokens for each in given)
    assert 0 <= budget.most_tokens(SESSION) <= min(there, tokens)
    budget.granted(SESSION, granted)
    assert 0 <= budget.most_tokens(SESSION) <= max(0, min(there, tokens - granted))


def test_prompts_are_counted_over_the_last_seconds() -> None:
    whole = WholePrompts()
    assert whole.per_s(100.0) == 0.0
    for index in range(1000):
        whole.came(index / 10)
    assert whole.per_s(100.0) == pytest.approx(10, rel=0.02)
    assert whole.per_s(100.0 + RATE_S) == pytest.approx(10 / math.e, rel=0.02)


def test_the_first_prompts_say_how_many_come_as_well_as_later_ones() -> None:
    """Counted over twenty seconds of which there were two, they would be a tenth."""
    whole = WholePrompts()
    for index in range(20):
        whole.came(5000 + index / 10)
    assert whole.per_s(5002.0) == pytest.approx(20 / 3, rel=0.05)
