"""Traces: the same for the same seed, within the model, with the published distributions."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.engine_jobs import SessionMode
from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.streaming import (
    CLOSING_TOKENS,
    PREFIX_TOKENS,
    RETRIEVERS,
    TracedSession,
    WorkloadSpec,
    draw,
    draw_trace,
)

VOCABULARY = 400
PUBLISHED = {
    SessionMode.APPEND: {"tokens": (8889, 5749), "chunks": (7.86, 8), "inter_chunk_ms": (1053.0, 700.67)},
    SessionMode.UPDATE: {"tokens": (13_006, 10_126), "chunks": (4.42, 4), "inter_chunk_ms": (157.14, 36.68)},
}

modes = pytest.mark.parametrize("mode", SessionMode)


def trace(mode: SessionMode, sessions: int = 40, max_model_len: int = 2048, **given_spec: float) -> list[TracedSession]:
    spec = replace(WorkloadSpec(mode, sessions, rate_per_s=2.0, token_scale=0.1), **given_spec)  # type: ignore[arg-type]
    return list(draw_trace(spec, VOCABULARY, max_model_len))


@modes
def test_same_seed_gives_the_same_trace_and_another_seed_another(mode: SessionMode) -> None:
    assert trace(mode, seed=1) == trace(mode, seed=1)
    assert trace(mode, seed=1) != trace(mode, seed=2)


@given(
    mode=st.sampled_from(SessionMode),
    seed=st.integers(0, 2**32),
    token_scale=st.floats(0.0001, 2.0),
    max_model_len=st.integers(PREFIX_TOKENS[1] + CLOSING_TOKENS[1] + 2, 4096),
)
def test_every_prompt_fits_the_model_and_no_input_is_empty(
    mode: SessionMode, seed: int, token_scale: float, max_model_len: int
) -> None:
    for session in trace(mode, 3, max_model_len, seed=seed, token_scale=token_scale):
        assert len(session.prompt) < max_model_len
        assert all(each.tokens for each in session.inputs)
        assert all(0 <= token < VOCABULARY for token in session.prompt)
        assert session.prefix
        assert session.closing


@modes
def test_times_rise_from_arrival_to_finish_and_arrivals_rise(mode: SessionMode) -> None:
    sessions = trace(mode)
    assert [each.arrival_s for each in sessions] == sorted(each.arrival_s for each in sessions)
    for session in sessions:
        at_s = [session.arrival_s, *(each.at_s for each in session.inputs)]
        assert at_s == sorted(at_s)
        assert session.finish_s == at_s[-1]


def test_appended_inputs_add_up_to_the_prompt() -> None:
    for session in trace(SessionMode.APPEND):
        pieces = [session.prefix, *(each.tokens for each in session.inputs), session.closing]
        assert session.prompt == tuple(token for piece in pieces for token in piece)


def test_update_replaces_the_prompt_by_one_of_the_same_length_with_the_same_prefix() -> None:
    for session in trace(SessionMode.UPDATE):
        assert {len(each.tokens) for each in session.inputs} == {len(session.inputs[0].tokens)}
        assert all(each.tokens[: len(session.prefix)] == session.prefix for each in session.inputs)
        assert session.prompt == session.inputs[-1].tokens + session.closing


def test_updates_share_prefixes_of_all_lengths_with_the_list_before() -> None:
    shares = [
        next((at for at, (old, new) in enumerate(zip(low.tokens, high.tokens, strict=True)) if old != new), None)
        for session in trace(SessionMode.UPDATE, 200)
        for low, high in pairwise(session.inputs)
    ]
    lengths = sorted(share for share in shares if share is not None)
    assert len(lengths) > 200
    assert lengths[0] < 100
    assert lengths[-1] > 1000


@modes
def test_scales_apply_to_tokens_and_delays_and_not_to_arrivals(mode: SessionMode) -> None:
    plain, slow = trace(mode, time_scale=1.0), trace(mode, time_scale=3.0)
    assert [each.arrival_s for each in plain] == [each.arrival_s for each in slow]
    for one, other in zip(plain, slow, strict=True):
        assert other.finish_s - other.arrival_s == pytest.approx(3 * (one.finish_s - one.arrival_s))
    small, large = (trace(mode, 200, 65_536, token_scale=scale) for scale in (0.005, 0.05))
    sizes = [median(len(each.prompt) - 60 for each in group) for group in (small, large)]
    assert sizes[1] / sizes[0] == pytest.approx(10, rel=0.3)


def test_arrivals_come_at_the_rate() -> None:
    sessions = trace(SessionMode.APPEND, 1000, token_scale=0.001)
    assert mean(high.arrival_s - low.arrival_s for low, high in pairwise(sessions)) == pytest.approx(0.5, rel=0.1)


@modes
@pytest.mark.parametrize(("what", "mean_tolerance"), [("tokens", 0.1), ("chunks", 0.1), ("inter_chunk_ms", 0.5)])
def test_draws_have_the_published_mean_and_median(mode: SessionMode, what: str, mean_tolerance: float) -> None:
    rng = random.Random(0)
    drawn = [draw(getattr(RETRIEVERS[mode], what), rng) for _ in range(20_000)]
    published_mean, published_median = PUBLISHED[mode][what]
    assert median(drawn) == pytest.approx(published_median, rel=0.05)
    assert mean(drawn) == pytest.approx(published_mean, rel=mean_tolerance)


def test_model_too_short_for_any_context_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_model_len"):
        trace(SessionMode.APPEND, max_model_len=64)


@pytest.mark.parametrize("name", ["rate_per_s", "token_scale", "time_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_rate_or_scale_that_is_no_number_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=name):
        trace(SessionMode.APPEND, 4, 2048, **{name: value})
