"""Prompts take memory while they are held, and no more of it than there may be."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.errors import OverloadedError
from control_plane.intake.prompt_memory import TOKEN_BYTES, HeldPrompt, PromptMemory


def memory(tokens: int) -> PromptMemory:
    return PromptMemory(tokens * TOKEN_BYTES)


def test_a_prompt_that_does_not_fit_is_refused_and_takes_nothing() -> None:
    prompts = memory(100)
    with prompts.holding(60):
        with pytest.raises(OverloadedError, match=r"router\.max_prompt_mib") as refused, prompts.holding(41):
            pytest.fail("it does not fit")
        with prompts.holding(40):
            assert prompts.used_bytes == prompts.limit_bytes
        assert prompts.used_bytes == 60 * TOKEN_BYTES
    assert refused.value.retry_after_ms == 1000
    assert prompts.used_bytes == 0


def test_what_is_held_is_given_back_whatever_ends_the_request() -> None:
    prompts = memory(100)
    with pytest.raises(ZeroDivisionError), prompts.holding(60):
        raise ZeroDivisionError
    assert prompts.used_bytes == 0


def test_a_session_that_grows_too_long_keeps_what_it_had() -> None:
    prompts = memory(100)
    with prompts.holding() as held:
        held.resize(90)
        with pytest.raises(OverloadedError):
            held.resize(101)
        assert prompts.used_bytes == 90 * TOKEN_BYTES
        held.resize(10)
        held.resize(100)
    assert prompts.used_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=40))
def test_the_sum_of_all_prompts_is_what_is_used(sizes: list[tuple[int, int]]) -> None:
    prompts = memory(100)
    held, known = [HeldPrompt(prompts) for _ in range(5)], [0] * 5
    for which, tokens in sizes:
        if _fits(held[which].resize, tokens):
            known[which] = tokens
        assert prompts.used_bytes == sum(known) * TOKEN_BYTES <= prompts.limit_bytes


def _fits(resize: Callable[[int], None], tokens: int) -> bool:
    try:
        resize(tokens)
    except OverloadedError:
        return False
    return True
