"""How many tokens a step has while tenants take turns, where any step costs something and each token more."""

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from prefill_worker.step_limit import TURN_STEP_S, StepLimit
from prefill_worker.step_speed import StepSpeed

BUDGET, BLOCK = 2048, 16
PER_S = 40_000.0
# What any step costs.
COSTS_S = [0.001, 0.005, 0.010, 0.020, 0.030, 0.060]


@dataclass
class MixedTraffic:
    """An engine that always has prompts of several tenants; its clock moves by what steps take."""

    fixed_s: float
    per_s: float = PER_S
    budget: int = BUDGET
    # By how much of it a step may take longer, or shorter.
    noise: float = 0.0
    # The host is late for each step, by so much in the mean.
    late_s: float = 0.0
    speed: StepSpeed = field(default_factory=StepSpeed)
    now_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def step(self, tokens: int) -> float:
        """Returns what it took."""
        took_s = (self.fixed_s + tokens / self.per_s) * (1 + self.rng.uniform(-self.noise, self.noise))
        took_s += self.rng.expovariate(1 / self.late_s) if self.late_s else 0.0
        step = object()
        self.speed.began(step, tokens, self.now_s)
        self.now_s += took_s
        self.speed.ended(step, self.now_s)
        return took_s

    def steps(self, seconds: float) -> tuple[int, float]:
        """(tokens computed in so long, what the last step took)."""
        until_s, computed, took_s = self.now_s + seconds, 0, 0.0
        while self.now_s < until_s:
            tokens = int(min(self.budget, max(BLOCK, self.speed.turn_step_tokens)))
            took_s = self.step(tokens)
            computed += tokens
        return computed, took_s

    def full_tokens(self, seconds: float) -> float:
        """Those of as long without a limit."""
        return seconds * self.budget / (self.fixed_s + self.budget / self.per_s)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("budget", [BUDGET, 8192, 16_384])
@pytest.mark.parametrize("fixed_s", COSTS_S)
def test_mixed_traffic_keeps_three_quarters_of_what_there_is_after_a_warm_up_of_tiny_steps(
    fixed_s: float, budget: int, noise: float
) -> None:
    """Steps of 16 tokens were once all there ever were, where a step costs 25 ms: 2% of the engine."""
    traffic = MixedTraffic(fixed_s, budget=budget, noise=noise)
    for _ in range(4):
        traffic.step(1)
    traffic.now_s += 1.0
    assert traffic.steps(20.0)[0] >= 0.74 * traffic.full_tokens(20.0)


@pytest.mark.parametrize("fixed_s", [0.025, 0.030, 0.060])
def test_it_recovers_from_steps_of_one_token_within_a_second(fixed_s: float) -> None:
    traffic = MixedTraffic(fixed_s)
    for _ in range(40):
        traffic.step(1)
    traffic.steps(1.5)
    assert traffic.speed.turn_step_tokens >= 1024


@pytest.mark.parametrize(
    ("fixed_s", "step_s"), [(0.001, TURN_STEP_S), (0.005, TURN_STEP_S), (0.010, 0.040), (0.020, 0.080)]
)
def test_a_step_takes_what_it_may_or_four_times_what_any_costs(fixed_s: float, step_s: float) -> None:
    traffic = MixedTraffic(fixed_s, budget=16_384)
    assert traffic.steps(5.0)[1] == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late_s", [0.002, 0.005])
def test_a_host_that_is_often_late_does_not_throw_the_limit_about(late_s: float, seed: int) -> None:
    """By the last steps of two sizes alone, one step in four was half or double of what is right, or further."""
    traffic = MixedTraffic(0.010, budget=8192, late_s=late_s, rng=random.Random(seed))
    traffic.steps(3.0)
    right = 3 * (0.010 + late_s) * PER_S
    limits = []
    for _ in range(1000):
        # Some prompts end before.
        share = traffic.rng.uniform(0.02, 1.0) if traffic.rng.random() < 0.3 else 1.0
        traffic.step(int(max(BLOCK, share * traffic.speed.turn_step_tokens)))
        limits.append(traffic.speed.turn_step_tokens)
    assert sum(right / 2 < limit < 2 * right for limit in limits) > 0.95 * len(limits)


@pytest.mark.parametrize(
    ("fixed_s", "per_s", "step_s"), [(0.005, 10_000.0, 0.025), (0.030, 40_000.0, 0.12), (0.001, 90_000.0, 0.025)]
)
def test_an_engine_that_has_changed_is_found_while_traffic_is_mixed(
    fixed_s: float, per_s: float, step_s: float
) -> None:
    """No step is full any more: the limit falls, and rises, by short ones."""
    traffic = MixedTraffic(0.005, budget=8192)
    traffic.steps(5.0)
    traffic.fixed_s, traffic.per_s = fixed_s, per_s
    traffic.steps(5.0)
    assert traffic.steps(5.0)[1] == pytest.approx(step_s, rel=0.1)


def test_the_speed_falls_with_the_engine_while_traffic_is_mixed() -> None:
    traffic = MixedTraffic(0.005)
    traffic.steps(5.0)
    traffic.per_s = PER_S / 4
    traffic.steps(150.0)
    assert traffic.speed.tokens_per_s < 1.2 * PER_S / 4


def test_steps_of_one_size_are_halved_once_to_tell_the_costs_apart() -> None:
    """Else the limit would stay where steps take 25 ms, whatever any step costs."""
    limit = StepLimit()
    limit.measured(683, 0.010 + 683 / PER_S)
    limit.measured(limit.tokens, 0.010 + limit.tokens / PER_S)
    assert limit.fixed_s == pytest.approx(0.010)
    for _ in range(3):
        limit.measured(limit.tokens, 0.010 + limit.tokens / PER_S)
    assert limit.tokens == pytest.approx(1200)


def test_small_steps_leave_the_limit_as_it_is_unless_they_take_too_long() -> None:
    limit = StepLimit()
    for tokens in (2048, 900, 800):
        limit.measured(tokens, 0.005 + tokens / PER_S)
    known = limit.tokens
    assert known == pytest.approx(800, rel=0.05)
    for _ in range(10):
        limit.measured(30, 0.005 + 30 / PER_S)
    assert limit.tokens == known
    # One that a host was late for; half is the least that it makes of it.
    limit.measured(30, 0.5)
    assert known / 2 <= limit.tokens <= known


def test_there_is_no_limit_before_a_step_took_too_long_and_one_of_a_few_tokens_sets_none_below_a_floor() -> None:
    limit = StepLimit()
    assert limit.tokens == math.inf
    limit.measured(500, 0.020)
    assert limit.tokens == math.inf
    limit = StepLimit()
    limit.measured(1, 0.030)
    assert limit.tokens == 256
    assert limit.most_per_s == math.inf, "nothing tells the two costs apart"


@pytest.mark.parametrize("factor", [0.1, 0.3, 0.5, 0.7, 1.4, 2.0, 4.0, 10.0])
@pytest.mark.parametrize(("fixed_s", "each_s"), [(0.020, 0.001), (0.005, 25e-6), (0.030, 25e-6), (0.004, 0.0015)])
def test_after_a_change_of_speed_the_limit_is_not_far_off_for_long(
    fixed_s: float, each_s: float, factor: float
) -> None:
    """Steps always have as many tokens as they may: what is measured of other sizes is old."""
    limit = StepLimit()
    for _ in range(500):
        tokens = min(limit.tokens, 8192.0)
        limit.measured(tokens, fixed_s + each_s * tokens)
    fixed_s, each_s = fixed_s * factor, each_s * factor
    right = (max(TURN_STEP_S, 4 * fixed_s) - fixed_s) / each_s
    wrong = []
    for number in range(500):
        tokens = min(limit.tokens, 8192.0)
        limit.measured(tokens, fixed_s + each_s * tokens)
        if not right / 2.1 < limit.tokens < 2.1 * right:
            wrong.append(number)
    # But for single steps of half as many tokens, which measure another size.
    assert sum(later == number + 1 for number, later in pairwise(wrong)) < 80, wrong


def test_a_step_has_a_token_however_dear_it_is() -> None:
    limit = StepLimit()
    for _ in range(2000):
        limit.measured(1, 0.5)
    assert limit.tokens == 1


def test_a_host_that_was_asleep_for_a_second_moves_the_limit_little() -> None:
    limit = StepLimit()
    for number in range(200):
        tokens = min(limit.tokens, 8192.0) / (1 + number % 2)
        limit.measured(tokens, 0.010 + tokens / PER_S)
    limit.measured(limit.tokens, 1.0)
    for number in range(4):
        tokens = limit.tokens / (1 + number % 2)
        limit.measured(tokens, 0.010 + tokens / PER_S)
    assert limit.tokens == pytest.approx(1200, rel=0.25)
