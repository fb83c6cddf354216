"""Decode workers on a real engine in fp32: whatever is decoded together, tokens are those of plain vLLM."""

from typing import Any

import pytest

from decode_worker.stop_policies import POLICIES
from tests.engine_process import in_engine_process
from tests.integration.decode_trials import REQUESTS, decode_trials

pytestmark = pytest.mark.integration

_ORDERED_BY_VLLM = "V2 of vLLM's model runners has an order of its own"


@pytest.fixture(scope="module")
def trials() -> dict[str, Any]:
    return in_engine_process(decode_trials)


@pytest.fixture
def by_policy(trials: dict[str, Any]) -> dict[str, Any]:
    return {name: its for name, its in trials.items() if name in (*POLICIES, "unordered")}


@pytest.mark.parametrize("policy", [*POLICIES, "unordered"])
def test_tokens_are_those_of_plain_vllm(by_policy: dict[str, Any], policy: str) -> None:
    if policy not in by_policy:
        pytest.skip(_ORDERED_BY_VLLM)
    told = by_policy[policy]
    assert told["wrong"] == []
    assert told["lost_blocks"] == told["left"] == 0
    assert told["aborted"] < REQUESTS / 2


def test_batches_were_formed_in_every_way(by_policy: dict[str, Any]) -> None:
    assert sum(told["preempted"] for told in by_policy.values()) > 0
    assert sum(told["aborted"] for told in by_policy.values()) > 0
    reasons = {reason for told in by_policy.values() for reason, number in told["admissions"].items() if number}
    assert reasons >= {"fcfs", "policy", "turn", "idle"}


def test_rows_that_share_a_prefix_lie_side_by_side(by_policy: dict[str, Any]) -> None:
    if "unordered" not in by_policy:
        pytest.skip(_ORDERED_BY_VLLM)
    for policy in POLICIES:
        assert by_policy[policy]["scattered"] == 0, policy
    assert by_policy["unordered"]["scattered"] > 0


def test_rows_that_change_places_without_their_blocks_are_noticed(trials: dict[str, Any]) -> None:
    if "unordered" not in trials:
        pytest.skip(_ORDERED_BY_VLLM)
    assert trials["rows_swapped_without_their_blocks"]["wrong"]
