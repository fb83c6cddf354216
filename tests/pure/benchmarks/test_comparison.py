"""How the simulator's figures are set beside those of a service."""

import json
import math

import pytest

from benchmarks.validation.cluster import Timed
from benchmarks.validation.comparison import Comparison, compared, tally
from benchmarks.validation.imitated import seen


def comparison(simulated: float, measured: float, tolerance: float = 0.1) -> Comparison:
    return Comparison("agents", "low", "ttft_p50_ms", measured, simulated, (simulated, simulated), tolerance)


def test_comparison_is_of_medians_and_shows_how_far_the_simulated_runs_lie_apart() -> None:
    (found,) = compared(
        "agents", "low", [{"a": 10.0}, {"a": 1.0}, {"a": 12.0}], [{"a": 9.0}, {"a": 90.0}, {"a": 11.0}], 0.1
    )
    assert (found.workload, found.load, found.figure) == ("agents", "low", "a")
    assert (found.measured, found.simulated, found.simulated_range) == (10.0, 11.0, (9.0, 90.0))
    assert found.ratio == 1.1


@pytest.mark.parametrize(("simulated", "within"), [(9.1, True), (10.9, True), (8.9, False), (11.1, False)])
def test_ten_percent_are_ten_percent_either_way(simulated: float, within: bool) -> None:
    assert comparison(simulated, 10.0).within is within


def test_nothing_beside_nothing_is_right_and_something_beside_nothing_is_not() -> None:
    assert comparison(0.0, 0.0).within
    missed = comparison(0.2, 0.0)
    assert missed.ratio == math.inf
    assert not missed.within
    assert missed.as_json()["ratio"] is None


def test_tally_counts_what_is_within_under_a_name_that_says_the_tolerance() -> None:
    told = tally([comparison(10.0, 10.0), comparison(20.0, 10.0)], 0.1)
    assert (told["within_10_percent"], told["of"]) == (1, 2)
    assert tally([], 0.15)["within_15_percent"] == 0
    first = json.loads(json.dumps(told))["figures"][0]
    assert {name: first[name] for name in ("workload", "load", "figure", "measured", "simulated", "ratio")} == {
        "workload": "agents", "load": "low", "figure": "ttft_p50_ms", "measured": 10.0, "simulated": 10.0, "ratio": 1.0,
    }  # fmt: skip


def test_what_clients_saw_becomes_figures() -> None:
    timed = [Timed(0.0, 100, [0.1, 0.2, 0.3], cached_tokens=64), Timed(1.0, 100, [1.3, 1.5, 1.9])]
    figures = seen(timed)
    assert figures["ttft_p99_ms"] == pytest.approx(300, rel=0.01)
    assert figures["tpot_p50_ms"] == pytest.approx(100, rel=0.01)
    assert figures["tpot_p99_ms"] == pytest.approx(300, rel=0.01)
    assert figures["hit_ratio"] == 0.32
    assert figures["throughput_tokens_per_s"] == pytest.approx(6 / 1.9)


def test_a_session_counts_from_its_opening_and_its_ttft_from_its_whole_prompt() -> None:
    timed = [Timed(4.0, 100, [4.5, 4.6], opened_s=1.0)]
    assert seen(timed)["ttft_p50_ms"] == pytest.approx(500, rel=0.01)
    assert seen(timed)["throughput_tokens_per_s"] == pytest.approx(2 / 3.6)
