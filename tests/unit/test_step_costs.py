"""What work costs, from made-up measurements."""

import pytest

from cluster_core.engine import EngineCosts
from worker_runtime.step_costs import StepCosts


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert StepCosts().costs() == EngineCosts()


def test_steps_that_only_decode_give_the_time_of_a_step_and_the_others_that_of_a_token() -> None:
    costs = StepCosts()
    for _ in range(5):
        costs.stepped(0.02, {"a": 1, "b": 1}, 2)
        costs.stepped(0.1, {"c": 100}, 100)
        # 0.02 of it for who decodes.
        costs.stepped(0.12, {"a": 1, "d": 100}, 101)
        costs.stepped(1.0, {}, 0)

    assert costs.costs().decode_step_s == pytest.approx(0.02)
    assert costs.costs().prefill_s_per_token == pytest.approx(0.001)


def test_old_measurements_fade() -> None:
    costs = StepCosts()
    for seconds in (1.0, 0.1):
        for _ in range(400):
            costs.stepped(seconds, {"a": 10}, 10)

    assert costs.costs().prefill_s_per_token == pytest.approx(0.01, rel=0.01)


def test_pulls_of_several_sizes_tell_the_fixed_part_apart() -> None:
    costs = StepCosts()
    for tokens in (100, 1000, 400, 5000):
        costs.pulled(0.003 + tokens * 1e-5, tokens)

    assert costs.costs().pull_s == pytest.approx(0.003)
    assert costs.costs().pull_s_per_token == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("pulls", "fixed", "each"),
    [
        ([(0.01, 100), (0.01, 100)], 0.0, 1e-4),
        ([(0.02, 100), (0.01, 1000)], 0.015, 0.0),
        ([(0.0, 100), (0.03, 200)], 0.0, 1.2e-4),
    ],
)
def test_neither_part_of_a_pull_is_negative(pulls: list[tuple[float, int]], fixed: float, each: float) -> None:
    costs = StepCosts()
    for seconds, tokens in pulls:
        costs.pulled(seconds, tokens)

    assert costs.costs().pull_s == pytest.approx(fixed, rel=0.02)
    assert costs.costs().pull_s_per_token == pytest.approx(each, rel=0.02)


def test_loads_are_told_as_totals() -> None:
    costs = StepCosts()
    costs.loaded(0.5, 100)
    costs.loaded(0.5, 100)
    costs.loaded(1.0, 200)

    assert costs.costs().load_s_per_token == pytest.approx(0.005)
