"""Times of requests of late, read off the traces that have ended."""

import pytest
from rachis.v1 import generation_pb2 as generation

from control_plane.model.request_trace import Answered, RequestTrace
from control_plane.overview.times import MOST_REQUESTS, WINDOW_S, RecentTimes, quantile, recent_times, times_overview

NOW_S = 1000.0


def ended(at_s: float, ttft_s: float | None = 0.5, took_s: float = 2.5, tokens: int = 11) -> RequestTrace:
    trace = RequestTrace(began_s=at_s - took_s, asked_s=at_s - took_s, ended_s=at_s)
    trace.first_token_s = None if ttft_s is None else trace.asked_s + ttft_s
    trace.answered = Answered(8, 0, tokens, generation.Route())
    return trace


def test_tpot_is_what_each_token_after_the_first_took() -> None:
    times = recent_times(iter([ended(NOW_S)]), NOW_S)
    assert (times.ttft_s, times.tpot_s) == ([0.5], [0.2])


def test_an_answer_of_one_token_has_no_tpot_and_one_without_a_token_no_ttft() -> None:
    times = recent_times(iter([ended(NOW_S, tokens=1), ended(NOW_S, ttft_s=None)]), NOW_S)
    assert (times.ttft_s, times.tpot_s) == ([0.5], [])


def test_only_the_last_minute_counts_and_of_it_no_more_than_the_bound() -> None:
    traces = [ended(NOW_S), ended(NOW_S - WINDOW_S - 1), ended(NOW_S - WINDOW_S - 2)]
    assert len(recent_times(iter(traces), NOW_S).ttft_s) == 1
    assert len(recent_times(iter([ended(NOW_S)] * (MOST_REQUESTS + 5)), NOW_S).ttft_s) == MOST_REQUESTS


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5.0), (0.9, 9.0), (1.0, 10.0)])
def test_a_quantile_is_one_of_the_values(share: float, expected: float) -> None:
    assert quantile([float(value) for value in range(1, 11)], share) == expected


def test_nothing_measured_is_told_as_nothing() -> None:
    overview = times_overview([], 5.0)
    assert not overview.HasField("p50_s") and not overview.HasField("p90_s") and overview.objective_s == 5.0


def test_an_answer_that_went_on_here_has_no_times_here() -> None:
    """Of its tokens most came elsewhere, and the first did; one that was broken off here has no answer to say so."""
    resumed, broken_off = ended(NOW_S), ended(NOW_S)
    assert resumed.answered is not None
    resumed.answered.route.resumed_tokens = 9
    broken_off.kind, broken_off.answered = "resumed", None
    assert recent_times(iter([resumed, broken_off]), NOW_S) == RecentTimes([], [])


def test_best_effort_is_left_out_and_pushes_out_nobody() -> None:
    best_effort = ended(NOW_S, ttft_s=30.0, took_s=50.0)
    best_effort.priority = 1
    times = recent_times(iter([*[best_effort] * (MOST_REQUESTS + 5), ended(NOW_S)]), NOW_S)
    assert (times.ttft_s, times.tpot_s) == ([0.5], [0.2])
