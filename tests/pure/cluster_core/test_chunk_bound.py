"""Chunks by cost: the largest one whose step stays within a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.chunk_bound import largest_chunk


def ten_milliseconds_and_one_each(tokens: int) -> float:
    return 0.010 + 0.001 * tokens


@pytest.mark.parametrize(
    ("most_tokens", "bound_s", "expected"),
    [
        (100, 0.0305, 20),
        (100, 0.0115, 1),
        (100, 0.0105, 0),
        (100, 0.005, 0),
        (100, 1.0, 100),
        (15, 0.0305, 15),
        (1, 0.0305, 1),
        (0, 1.0, 0),
        (-3, 1.0, 0),
    ],
)
def test_the_largest_chunk_within_the_bound_is_found(most_tokens: int, bound_s: float, expected: int) -> None:
    assert largest_chunk(ten_milliseconds_and_one_each, most_tokens, bound_s) == expected


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=300),
    st.floats(0, 30),
)
def test_any_costs_that_do_not_fall_give_what_trying_every_chunk_gives(growth: list[float], bound_s: float) -> None:
    seconds = [0.0]
    for each in growth:
        seconds.append(seconds[-1] + each)
    fitting = [tokens for tokens in range(1, len(seconds)) if seconds[tokens] <= bound_s]
    assert largest_chunk(seconds.__getitem__, len(growth), bound_s) == max(fitting, default=0)


def test_costs_are_asked_for_a_few_times_only() -> None:
    asked = []

    def step_s(tokens: int) -> float:
        asked.append(tokens)
        return ten_milliseconds_and_one_each(tokens)

    assert largest_chunk(step_s, 8192, 0.5105) == 500
    assert len(asked) <= 2 + 13
