"""How fast an engine is, from its steps."""

import math

import pytest

from prefill_worker.step_speed import SHORT_STEP_S, StepSpeed


def test_the_fastest_of_late_counts() -> None:
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
    assert speed.tokens_per_s == 600.0, "it began when the first one had ended"
    speed.ended(second, 9.0)
    assert speed.tokens_per_s == 600.0


def late_host(speed: StepSpeed, late_every: int, steps: int = 400, tokens: int = 1000, step_s: float = 0.025) -> None:
    """Steps one at a time; of one in so many the host hears that it has begun when it is nearly over."""
    for number in range(steps):
        step, end_s = object(), (number + 1) * step_s
        speed.began(step, tokens, end_s - (0.0015 if number % late_every == 0 else step_s))
        speed.ended(step, end_s)


def test_a_step_that_seems_over_at_once_makes_no_engine_many_times_as_fast() -> None:
    """An imitated H100 was once taken for one of 663,000 tokens a second, for good."""
    for late_every in (1, 2, 3, 10):
        speed = StepSpeed()
        late_host(speed, late_every)
        assert 40_000 * 0.999 <= speed.tokens_per_s < 1.5 * 40_000


def test_pauses_do_not_count() -> None:
    speed = StepSpeed()
    for number in range(4):
        step = object()
        speed.began(step, 1000, 10.0 * number)
        speed.ended(step, 10.0 * number + 0.025)
    assert speed.tokens_per_s == pytest.approx(40_000)


def test_short_steps_are_measured_together() -> None:
    speed = StepSpeed()
    for number in range(49):
        step = object()
        speed.began(step, 10, number * 0.001)
        speed.ended(step, (number + 1) * 0.001)
    assert speed.tokens_per_s == 0.0
    step = object()
    speed.began(step, 10, 0.049)
    speed.ended(step, 0.0505)
    assert speed.tokens_per_s == pytest.approx(500 / 0.0505)


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
