"""Both tiers on real engines of both pools: what is computed again and what is not, and that tokens never differ."""

from typing import Any

import pytest

from tests.engine_process import in_engine_process
from tests.integration.tier_trials import LESSON_OWN, LESSON_SHARED, LESSON_TOKENS, tier_trials
from worker_runtime.engine_settings import EngineRole

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=["prefill", "decode"])
def trials(request: pytest.FixtureRequest) -> dict[str, Any]:
    return in_engine_process(tier_trials, EngineRole(request.param))


def test_the_lesson_of_the_radix_cache(trials: dict[str, Any]) -> None:
    """97 shared tokens are 96 in full blocks: 6 of the prompt and 19 generated ones are computed."""
    told = trials["lesson"]
    assert (told["computed"], told["steps"]) == (25, LESSON_TOKENS)
    assert told["all_computed"] == LESSON_SHARED + LESSON_OWN + LESSON_TOKENS - 1 == 121
    assert told["same"]


def test_what_was_pushed_off_the_device_comes_back_from_host_memory(trials: dict[str, Any]) -> None:
    told = trials["round_trip"]
    assert told["on_device"] < 6
    assert told["host_hit_tokens"] == 192 - 32 * told["on_device"]
    assert told["computed"] == 200 - 192 + 3
    assert told["same"]


def test_no_hit_and_no_hotness_crosses_tenants(trials: dict[str, Any]) -> None:
    assert trials["salts"] == {"other": 103, "same": 7, "raised_by_other": 0}


def test_a_tenant_that_floods_the_device_leaves_the_others_what_they_ask_for_again(trials: dict[str, Any]) -> None:
    """Three full blocks; without tenants the flood takes them."""
    assert trials["shares"] == {"on_device": [3, 0], "same": True}


def test_copies_that_fail_cost_nothing_but_themselves(trials: dict[str, Any]) -> None:
    told = trials["failing_copies"]
    assert told["failed"] > 0
    assert told["copied_out"] == 0
    assert told["in_host_afterwards"] == 6
    assert told["same"]


def test_requests_aborted_while_their_blocks_are_on_the_way_leave_nothing_wrong(trials: dict[str, Any]) -> None:
    assert trials["aborts"]["same"]


def test_an_idle_engine_goes_on_copying(trials: dict[str, Any]) -> None:
    assert trials["idle"] == {"in_host": 9, "waiting": 0}


def test_after_a_reset_nothing_is_found_in_either_tier(trials: dict[str, Any]) -> None:
    assert trials["reset"] == {"done": True, "left": 0, "computed": 203, "same": True}
