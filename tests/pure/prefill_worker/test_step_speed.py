"""How fast an engine is, from its steps."""

import math

import pytest

from prefill_worker.step_speed import SHORT_STEP_S, StepSpeed


def test_the_fastest_step_of_late_counts() -> None:
    speed = StepSpeed()
    assert speed.tokens_per_s == 0.0
    now_s = 0.0
    for tokens, took_s in ((100, 1.0), (1000, 1.0), (60, 1.0), (1, 1.0)):
        step = object()
        speed.began(step, tokens, now_s)
        now_s += took_s
        speed.ended(step, now_s)
    assert speed.tokens_per_s == pytest.approx(1000 * 0.999)


def test_what_was_fast_long_ago_is_forgotten() -> None:
    speed, now_s = StepSpeed(), 0.0
    for tokens in (1000, *[100] * 10_000):
        step = object()
        speed.began(step, tokens, now_s)
        now_s += 1.0
        speed.ended(step, now_s)
    assert speed.tokens_per_s == 100.0


def test_steps_under_way_end_in_order_and_unknown_ones_are_ignored() -> None:
    speed, first, second = StepSpeed(), object(), object()
    speed.began(first, 100, 0.0)
    speed.began(second, 300, 0.5)
    speed.ended(object(), 0.6)
    speed.ended(first, 1.0)
    assert speed.tokens_per_s == 100.0
    speed.ended(second, 1.5)
    assert speed.tokens_per_s == 300.0
    speed.ended(second, 9.0)
    assert speed.tokens_per_s == 300.0


def test_a_wait_earns_half_of_what_the_engine_computes_and_counts_alone_before_that_is_known() -> None:
    speed, step = StepSpeed(), object()
    assert speed.left_tokens(1000, 3.0) == -3.0
    speed.began(step, 200, 0.0)
    speed.ended(step, 1.0)
    assert speed.left_tokens(1000, 3.0) == 700.0


@pytest.mark.parametrize("overhead_s", [0.0, 0.001, 0.045, 0.06, 0.5])
def test_short_steps_do_not_get_shorter_and_shorter_whatever_any_step_costs(overhead_s: float) -> None:
    speed, now_s, per_s, tokens = StepSpeed(), 0.0, 10_000.0, 2048
    assert speed.short_step_tokens == math.inf
    first = tokens / (overhead_s + tokens / per_s)
    for _ in range(10_000):
        step = object()
        speed.began(step, tokens, now_s)
        now_s += overhead_s + tokens / per_s
        speed.ended(step, now_s)
        tokens = max(32, int(min(speed.short_step_tokens, 2048)))
    assert tokens == int(first * SHORT_STEP_S)
