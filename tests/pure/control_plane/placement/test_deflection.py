"""Prefill deflection as published, with numbers by hand."""

import pytest

from control_plane.placement import deflection
from control_plane.placement.by_objective import Objectives, Way
from tests.pure.control_plane.placement.both_views import first_choice, view

OBJECTIVES = Objectives(1.0, 0.1, alpha=1.0)
PREFILLS = {"heavy": 1.0, "own_s": 0.3, "pull_s": 0.1}
DECODES = {"own_s": 0.3, "step_s": 0.05, "step_with_s": 0.05}


@pytest.mark.parametrize(
    ("prefills", "decodes", "way", "ttft_s"),
    [
        # 0.4 s with its transfer; at half of a decode node's time 0.6 s.
        ({}, {}, Way.APART, 0.4),
        ({"queue_s": 0.3}, {}, Way.WHOLE, 0.6),
        ({"queue_s": 0.3}, {"queue_s": 0.1}, Way.APART, 0.7),
        # What lies there is not computed again.
        ({"queue_s": 0.3}, {"own_s": 0.01, "queue_s": 0.1}, Way.WHOLE, 0.22),
        # Its decodes bear no more, whatever it would take.
        ({"queue_s": 9.0}, {"step_with_s": 0.11}, Way.APART, 9.4),
        ({"passes": 0.0}, {"step_with_s": 0.11}, Way.WHOLE, 0.6),
    ],
)
def test_a_prompt_goes_where_its_first_token_is_soonest_and_decodes_bear_it(
    prefills: dict[str, float], decodes: dict[str, float], way: Way, ttft_s: float
) -> None:
    found_way, found_s = first_choice(deflection.choices, OBJECTIVES, PREFILLS | prefills, DECODES | decodes)
    assert found_way is way and found_s == pytest.approx(ttft_s)


def test_nobody_may_get_what_no_worker_may() -> None:
    assert deflection.choices(view(PREFILLS | {"passes": 0.0}), OBJECTIVES) == []
