"""What `rachis bench pace` makes of the messages that came, and of the cost model."""

import pytest

from benchmarks.pace import Arrivals, modelled_ms, per_token_ms, report_of
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import StepWork

COSTS = catalog.load("h100-llama-3.1-8b")


def step_ms(answers: int, place: float) -> float:
    return 1000 * COSTS.step_s(StepWork(0, 0.0, answers, answers * place, answers * place))


def test_gaps_are_those_of_the_time_that_is_measured() -> None:
    arrivals = Arrivals(5, [(1.0, 1), (2.0, 1), (2.5, 2), (4.0, 1)])

    assert arrivals.gaps_ms(2.0, 3.0) == [(500.0, 2)]


def test_tokens_that_come_together_share_the_time_since_the_last_message() -> None:
    assert per_token_ms([(30.0, 3), (8.0, 1), (5.0, 0)]) == [8.0, 10.0, 10.0, 10.0]


def test_an_answer_is_expected_to_take_the_step_of_its_own_worker() -> None:
    modelled = modelled_ms(COSTS, {"decode-0": 1, "decode-1": 3}, 1000.0)

    assert modelled == [step_ms(1, 1000.0), *[step_ms(3, 1000.0)] * 3]


def test_a_report_sets_what_came_beside_the_model() -> None:
    step = step_ms(2, 600.0)
    measured = {
        "seconds": 2.0, "client_cpu_s": 0.5, "running": {"decode-0": 2}, "tokens": 400, "mean_place": 600.0,
        "gaps_ms": [(step, 1)] * 98 + [(2 * step, 1)] * 2,
    }  # fmt: skip

    report = report_of(measured, COSTS, 2, 12.0)

    assert report.p50_ms == report.modelled_p50_ms == report.modelled_p99_ms == round(step, 3)
    assert report.p99_of_model == pytest.approx(2.0, rel=1e-3)
    assert (report.tokens_per_s, report.tokens_per_message, report.client_cores) == (200.0, 1.0, 0.25)
