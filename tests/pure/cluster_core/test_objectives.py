"""Which objectives a request has."""

import pytest

from cluster_configs.loading import load
from cluster_configs.schema import ObjectivesSection
from cluster_core.errors import ConfigError
from cluster_core.objectives import ClassObjectives, RequestClass, class_of, objectives_by_class


@pytest.mark.parametrize(
    ("priority", "whose"),
    [(-1000, "interactive"), (-1, "interactive"), (0, "interactive"), (1, "best_effort"), (1000, "best_effort")],
)
def test_a_priority_above_0_is_best_effort(priority: int, whose: str) -> None:
    assert class_of(priority) == whose


@pytest.mark.parametrize(
    ("given", "best_effort"),
    [
        ({}, ClassObjectives(2.0, 0.05)),
        ({"ttft_s": 60.0}, ClassObjectives(60.0, 0.05)),
        ({"tpot_s": 0.5}, ClassObjectives(2.0, 0.5)),
        ({"tpot_s": 0.0}, ClassObjectives(2.0, 0.0)),
    ],
)
def test_best_effort_has_those_of_the_others_where_nothing_else_is_said(
    given: dict[str, float], best_effort: ClassObjectives
) -> None:
    section = ObjectivesSection.model_validate({"ttft_s": 2.0, "tpot_s": 0.05, "best_effort": given})
    found = objectives_by_class(section.model_dump())
    assert found == {RequestClass.INTERACTIVE: ClassObjectives(2.0, 0.05), RequestClass.BEST_EFFORT: best_effort}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("ttft_s", 1.0, "must be at least objectives.ttft_s, 5, got 1"), ("tpot_s", 0.01, "must be 0 or at least")],
)
def test_best_effort_is_promised_nothing_better(key: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(flags={"objectives.tpot_s": 0.05, f"objectives.best_effort.{key}": value})


def test_best_effort_has_no_pace_where_the_others_have_none() -> None:
    with pytest.raises(ConfigError, match="which must be set"):
        load(flags={"objectives.best_effort.tpot_s": 0.5})


def test_engines_hear_of_objectives_once_a_step_is_bounded_by_any() -> None:
    of_none = ObjectivesSection(ttft_s=9.0)
    assert of_none.for_engines == ObjectivesSection()
    of_some = ObjectivesSection.model_validate({"ttft_s": 9.0, "tpot_s": 0.1, "best_effort": {"tpot_s": 0.5}})
    assert of_some.for_engines is of_some
