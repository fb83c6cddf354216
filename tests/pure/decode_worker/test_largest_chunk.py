"""The largest chunk of prompt tokens whose step stays within a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.step_bound import largest_chunk


def line(fixed_ms: int, token_ms: int, tokens: int) -> float:
    return (fixed_ms + token_ms * tokens) / 1000


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "most_tokens", "bound_s", "chunk"),
    [
        (5, 1, 100, 0.025, 20),
        (5, 1, 100, 0.0251, 20),
        (5, 1, 10, 0.025, 10),
        (5, 1, 100, 0.006, 1),
        (5, 1, 100, 0.0059, 0),
        (30, 1, 100, 0.025, 0),
        (5, 1, 0, 0.025, 0),
        # Nothing has been measured yet: no step takes any time.
        (0, 0, 100, 0.025, 100),
    ],
)
def test_the_chunk_ends_where_one_token_more_would_pass_the_bound(
    fixed_ms: int, token_ms: int, most_tokens: int, bound_s: float, chunk: int
) -> None:
    assert largest_chunk(lambda tokens: line(fixed_ms, token_ms, tokens), most_tokens, bound_s) == chunk


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(-1, 200))
def test_it_is_what_trying_every_chunk_finds(growth_ms: list[int], bound_ms: int) -> None:
    def step_s(tokens: int) -> float:
        return sum(growth_ms[:tokens]) / 1000

    fits = [tokens for tokens in range(1, len(growth_ms) + 1) if step_s(tokens) <= bound_ms / 1000]
    assert largest_chunk(step_s, len(growth_ms), bound_ms / 1000) == max(fits, default=0)


def test_a_long_prompt_asks_for_few_costs() -> None:
    asked: list[int] = []

    def step_s(tokens: int) -> float:
        asked.append(tokens)
        return tokens / 1e6

    assert largest_chunk(step_s, 1_000_000, 0.5) == 500_000
    assert len(asked) <= 21
