"""TaiChi's length-aware prefill scheduling, with numbers by hand."""

import pytest

from control_plane.placement import length_aware
from control_plane.placement.by_objective import Objectives, Way
from tests.pure.control_plane.placement.both_views import first_choice, view

OBJECTIVES = Objectives(1.0, 0.1, alpha=1.0)
PREFILLS = {"heavy": 1.0, "own_s": 0.1, "pull_s": 0.1}
DECODES = {"own_s": 0.1, "step_s": 0.05, "step_with_s": 0.05}


@pytest.mark.parametrize(
    ("prefills", "decodes", "way", "ttft_s"),
    [
        # Sooner on a prefill-heavy worker, and in time at half of a decode-heavy one's.
        ({}, {}, Way.WHOLE, 0.2),
        ({}, {"queue_s": 0.37}, Way.WHOLE, 0.94),
        # Only the prefill-heavy one has it in time: 0.95 s is planned with.
        ({}, {"queue_s": 0.38}, Way.APART, 0.2),
        ({"queue_s": 0.74}, {"queue_s": 0.38}, Way.APART, 0.94),
        # Nobody: the soonest.
        ({"queue_s": 0.78}, {"queue_s": 0.38}, Way.WHOLE, 0.96),
        ({"queue_s": 0.78}, {"queue_s": 0.5}, Way.APART, 0.98),
        # Its decodes bear no more, whatever it would take.
        ({"queue_s": 9.0}, {"step_with_s": 0.11}, Way.APART, 9.2),
        ({"passes": 0.0}, {"step_with_s": 0.11}, Way.WHOLE, 0.2),
    ],
)
def test_a_prompt_leaves_prefill_heavy_workers_to_those_that_only_they_have_in_time(
    prefills: dict[str, float], decodes: dict[str, float], way: Way, ttft_s: float
) -> None:
    found_way, found_s = first_choice(length_aware.choices, OBJECTIVES, PREFILLS | prefills, DECODES | decodes)
    assert found_way is way and found_s == pytest.approx(ttft_s)


def test_among_those_that_have_it_in_time_the_soonest_comes_first() -> None:
    found = length_aware.choices(view(DECODES | {"queue_s": 0.2}, DECODES, PREFILLS), OBJECTIVES)
    assert [choice.row for choice in found] == [1, 0, 2]
