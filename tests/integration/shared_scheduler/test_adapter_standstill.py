"""Who has an adapter's place lacks blocks, and who waits for one has them: neither keeps the other for ever."""

from collections import Counter
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from prefill_worker.adapter_standstill import AdapterStandstill
from prefill_worker.partial_budget import PartialBudget
from prefill_worker.two_phase import TwoPhase
from tests.campaign.fuzz.kv_checking_runner import expected_tokens, root_of
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.integration.decode_scheduler.requests import text, until
from tests.integration.shared_scheduler.conftest import MakeEngine
from tests.integration.streaming_scheduler.sessions import park
from tests.integration.streaming_scheduler.sessions import request as request_of
from tests.planting import planted

pytestmark = pytest.mark.integration

# 23 blocks for requests, one adapter a step.
TIGHT: dict[str, Any] = {
    "blocks": 24, "host_slots": 0, "preemption": "recompute", "adapters": 2, "adapters_in_step": 1,
}  # fmt: skip
ANSWER = 4 * BLOCK_SIZE


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}")


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often, by name."""
    # The outcome of a step shows who was preempted in it, but not whom the scheduler chose.
    times, take = Counter[str](), TwoPhase._preempt_left_out

    def counted(self: Any, request: Any, now_s: float) -> None:
        times[request.request_id] += 1
        take(self, request, now_s)

    planted(monkeypatch, TwoPhase, "_preempt_left_out", counted)
    return times


def standing_still(make_engine: MakeEngine) -> SimulatedEngine:
    """One decodes on the only place and will lack a block; a session that waits for the place holds ten."""
    engine = make_engine(**TIGHT, token_budget=2 * BLOCK_SIZE)
    park(engine, "waits", text("waits", 10), lora_request=adapter(2))
    engine.add("decodes", text("decodes", 11), ANSWER, lora_request=adapter(1))
    # As one that wants the log-probabilities of its prompt: preempted, it computes all of it again.
    request_of(engine, "decodes").skip_reading_prefix_cache = True
    until(engine, lambda: bool(engine.answers.get("decodes")))
    engine.scheduler.extend_prompt("waits", text("more", 1))
    return engine


def test_who_decodes_on_the_place_gets_the_blocks_of_who_waits_for_it(
    make_engine: MakeEngine, preempted: Counter[str]
) -> None:
    engine = standing_still(make_engine)
    until(engine, lambda: "decodes" not in engine.scheduler.requests)
    assert preempted == {"waits": 1}
    assert engine.answers["decodes"] == expected_tokens(text("decodes", 11), ANSWER, root_of(adapter(1)))
    engine.scheduler.close_input("waits", [])
    engine.drain()
    assert engine.answers["waits"] == expected_tokens([*text("waits", 10), *text("more", 1)], 1, root_of(adapter(2)))


def test_that_they_stand_still_without_it_is_seen(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = standing_still(make_engine)
    planted(monkeypatch, AdapterStandstill, "_end_standstill", lambda self, plan, now_s: None)
    with pytest.raises(AssertionError, match="does not come to that"):
        until(engine, lambda: "decodes" not in engine.scheduler.requests)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_nobody_is_preempted_for_a_pull_where_no_adapter_is_asked_for(
    make_engine: MakeEngine, preempted: Counter[str], has_adapters: bool
) -> None:
    """A pull that is under way contends for no step either, and its blocks come back by themselves."""
    fields = TIGHT if has_adapters else {**TIGHT, "adapters": 0}
    engine = make_engine(**fields)
    engine.add("decodes", text("decodes", 6)[:-1], 40)
    engine.turn()
    engine.remote_tokens["pulled"] = 17 * BLOCK_SIZE - 1
    engine.add("pulled", text("pulled", 17)[:-1], 60, transfer={"do_remote_prefill": True}, priority=1)
    engine.drain()
    assert not preempted["decodes"]


def test_a_session_that_is_held_back_leaves_its_place_to_a_whole_prompt(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**TIGHT, token_budget=2 * BLOCK_SIZE)
    engine.open("open", text("open", 8), lora_request=adapter(1))
    until(engine, lambda: request_of(engine, "open").status is RequestStatus.RUNNING)
    # No step for it would bring what it costs.
    planted(monkeypatch, PartialBudget, "most_tokens", lambda self, each: 0)
    engine.add("whole", text("whole", 4), 2, lora_request=adapter(2))
    until(engine, lambda: "whole" not in engine.scheduler.requests)
    assert request_of(engine, "open").num_computed_tokens < 8 * BLOCK_SIZE
