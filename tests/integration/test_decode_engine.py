"""Decode workers on a real engine in fp32: whatever is decoded together, tokens are those of plain vLLM."""

import json
import subprocess
import sys
from typing import Any

import pytest

from decode_worker.stop_policies import POLICIES
from tests.integration.decode_trials import REQUESTS

pytestmark = pytest.mark.integration
TIMEOUT_S = 240


def trials(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.decode_trials", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.stdout, ran.stderr[-3000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def by_policy() -> dict[str, Any]:
    return trials()


@pytest.mark.parametrize("policy", [*POLICIES, "unordered"])
def test_tokens_are_those_of_plain_vllm(by_policy: dict[str, Any], policy: str) -> None:
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
    for policy in POLICIES:
        assert by_policy[policy]["scattered"] == 0, policy
    assert by_policy["unordered"]["scattered"] > 0


def test_rows_that_change_places_without_their_blocks_are_noticed() -> None:
    (told,) = trials("--plant").values()
    assert told["wrong"]
