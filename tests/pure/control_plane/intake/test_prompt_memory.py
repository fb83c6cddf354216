"""Prompts take memory while they are held, and no more of it than there may be."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant
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
    assert refused.value.retry_after_ms == 100
    assert prompts.used_bytes == 0
    with pytest.raises(OverloadedError) as refused, prompts.holding(101):
        pytest.fail("it never fits")
    assert refused.value.retry_after_ms is None


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


def test_best_effort_leaves_memory_for_the_others_however_much_of_it_waits() -> None:
    prompts = PromptMemory(100 * TOKEN_BYTES, best_effort_share=0.5)
    with ExitStack() as held:
        for tenant in ("a", "b"):
            held.enter_context(prompts.holding(25, Claimant(1, tenant)))
        with pytest.raises(OverloadedError, match=r"best effort's prompts .* router\.best_effort_share"):
            held.enter_context(prompts.holding(1, Claimant(2, "c")))
        held.enter_context(prompts.holding(50, Claimant(0, "c")))
        with pytest.raises(OverloadedError, match=r"router\.max_prompt_mib"):
            held.enter_context(prompts.holding(1, Claimant(0, "c")))
    assert prompts.used_bytes == 0
    prompts.check_invariants()


def test_a_tenant_leaves_memory_for_the_others() -> None:
    prompts = PromptMemory(100 * TOKEN_BYTES, tenant_share=0.5)
    with prompts.holding(40, Claimant(0, "a")) as grows, prompts.holding(10, Claimant(1, "a")):
        with pytest.raises(OverloadedError, match=r"this tenant's prompts .* router\.tenant_share"):
            grows.resize(41)
        with prompts.holding(50, Claimant(0, "b")):
            assert prompts.used_bytes == prompts.limit_bytes


@pytest.mark.parametrize("claimant", [Claimant(1, "a"), Claimant(0, "a")])
def test_a_prompt_that_is_larger_than_its_part_is_taken_while_it_is_the_only_one(claimant: Claimant) -> None:
    prompts = PromptMemory(100 * TOKEN_BYTES, tenant_share=0.25, best_effort_share=0.25)
    with prompts.holding(80, claimant) as held:
        held.resize(90)
        with pytest.raises(OverloadedError) as refused, prompts.holding(1, claimant):
            pytest.fail("it is not the only one")
        # 66 of 90 have to come back, and each is held for a second as far as anybody knows.
        assert refused.value.retry_after_ms == pytest.approx(1000 * 66 / 90, abs=1)
        with prompts.holding(10, Claimant(0, "b")):
            pass


@pytest.mark.parametrize(("held_s", "hint_ms"), [(0.0, 100), (8.0, 4000), (3600.0, 30_000)])
def test_the_hint_follows_how_long_prompts_have_been_held(held_s: float, hint_ms: int) -> None:
    now_s = 0.0
    prompts = PromptMemory(100 * TOKEN_BYTES, now_s=lambda: now_s)
    for tokens in (100, 1, 50):
        with prompts.holding(tokens):
            now_s += held_s
    with prompts.holding(100), pytest.raises(OverloadedError) as refused, prompts.holding(50):
        pytest.fail("it does not fit")
    # Half of what is there has to come back.
    assert refused.value.retry_after_ms == hint_ms


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=40))
def test_the_sum_of_all_prompts_is_what_is_used(sizes: list[tuple[int, int]]) -> None:
    prompts = PromptMemory(100 * TOKEN_BYTES, tenant_share=0.7, best_effort_share=0.5)
    whose = [Claimant(0, "a"), Claimant(0, "a"), Claimant(1, "a"), Claimant(2, "b"), Claimant(0, "b")]
    held, known = [HeldPrompt(prompts, each) for each in whose], [0] * 5
    for which, tokens in sizes:
        if _fits(held[which].resize, tokens):
            known[which] = tokens
        assert prompts.used_bytes == sum(known) * TOKEN_BYTES
        prompts.check_invariants()
        for few, most in ((known[2:4], 50), (known[:3], 70), (known[3:], 70)):
            assert sum(few) <= most or sum(map(bool, few)) == 1


def _fits(resize: Callable[[int], None], tokens: int) -> bool:
    try:
        resize(tokens)
    except OverloadedError:
        return False
    return True
