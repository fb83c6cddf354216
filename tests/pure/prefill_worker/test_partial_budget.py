"""A step computes of open sessions what is likelier to stay than what it costs those who wait for the step."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.partial_budget import PartialBudget
from prefill_worker.policies import Contender, Tenure
from prefill_worker.survival import Slice

SESSION = Contender("s", False, 0.0, 0.0, math.inf, 0, Tenure.WAITING, 0, remaining_tokens=100, known_tokens=100)


def slices(*found: Slice) -> Callable[[str, int, int], Sequence[Slice]]:
    return lambda name, first, tokens: found


@pytest.mark.parametrize(
    ("price", "given", "expected"),
    [
        # Nothing is known of the engine's speed, or nobody comes.
        (0.0, [Slice(100, 0.01)], 80),
        # What stays for sure is bounded by the step alone.
        (1.0, [Slice(100, 1.0)], 80),
        (0.01, [Slice(100, 0.5)], 50),
        (0.01, [Slice(20, 0.9), Slice(20, 0.5), Slice(60, 0.3)], 40),
        (0.01, [Slice(20, 0.9), Slice(20, 0.5), Slice(60, 0.45)], 45),
        # A block at least.
        (0.01, [Slice(100, 0.0)], 16),
        (0.01, [Slice(10, 0.0), Slice(90, 0.0)], 16),
        (0.01, [Slice(5, 0.0)], 5),
        (0.01, [], 0),
    ],
)
def test_slices_are_taken_while_they_are_worth_what_the_step_has_before_them(
    price: float, given: list[Slice], expected: int
) -> None:
    assert PartialBudget(80.0, slices(*given), price, 16).most_tokens(SESSION) == expected


def test_the_next_session_goes_on_where_the_one_before_ended() -> None:
    budget = PartialBudget(80.0, slices(Slice(100, 0.5)), 0.01, 16)
    budget.granted(SESSION, 30)
    assert budget.most_tokens(SESSION) == 20
    budget.granted(SESSION, 20)
    assert budget.most_tokens(SESSION) == 0


def test_nothing_is_computed_behind_a_whole_prompt() -> None:
    budget = PartialBudget(80.0, slices(Slice(100, 1.0)))
    budget.granted(dataclasses.replace(SESSION, complete=True), 10)
    assert budget.most_tokens(SESSION) == 0


@given(
    found=st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=6),
    price=st.sampled_from((0.0, 0.001, 0.1)),
    tokens=st.sampled_from((16.0, 50.0, math.inf)),
    granted=st.integers(0, 60),
)
def test_no_more_than_there_is_and_than_the_step_has_and_somebody_always_gets_a_block(
    found: list[tuple[int, float]], price: float, tokens: float, granted: int
) -> None:
    given = [Slice(*each) for each in found]
    budget = PartialBudget(tokens, slices(*given), price, 16)
    there = sum(each.tokens for each in given)
    assert min(there, 16) <= budget.most_tokens(SESSION) <= min(there, tokens)
    budget.granted(SESSION, granted)
    assert 0 <= budget.most_tokens(SESSION) <= max(0, min(there, tokens - granted))
