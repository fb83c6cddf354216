"""Requests whose KV is pulled: who waits for it, who shares it, and what happens when it does not come."""

import pytest
from vllm.v1.request import RequestStatus

from cluster_core.clock import monotonic_s
from kv_transfer.handoff.rules import DEADLINE_PARAM
from tests.campaign.fuzz.kv_checking_runner import LOAD_STEPS, expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, STEP_S, SteppedClock
from tests.integration.decode_scheduler.requests import (
    EVERY_PROTOCOL,
    GREEDY,
    LONG,
    SETTINGS,
    MakeEngine,
    add_group,
    held_blocks,
    prompt,
    status,
    text,
    until,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_nothing_is_pulled_for_a_request_that_waits(
    make_engine: MakeEngine, clock: SteppedClock, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    add_group(engine, "a", 5, max_tokens=400)
    engine.remote_tokens["stranger"] = 9 * BLOCK_SIZE
    engine.add("stranger", text("b", 10), 3)
    engine.add("a9", prompt(("a", 10), ("a9", 1)), 400)
    for _ in range(20):
        engine.turn()
        engine.check_invariants()
        assert status(engine, "stranger") is RequestStatus.WAITING
        assert held_blocks(engine, "stranger") == 0
        assert engine.remote_tokens["stranger"] == 9 * BLOCK_SIZE
    assert status(engine, "a9") is RequestStatus.RUNNING
    assert engine.scheduler.decode_report().waiting == {"capacity": 0, "held": 1, "prefix": 0, "share": 0}
    clock.advance(SETTINGS.wait_bound_s)
    until(engine, lambda: status(engine, "stranger") is RequestStatus.WAITING_FOR_REMOTE_KVS)
    report = engine.scheduler.decode_report()
    assert (report.loading_requests, report.admissions["overdue"]) == (1, 1)
    assert SETTINGS.wait_bound_s <= report.longest_held_s < SETTINGS.wait_bound_s + 30 * STEP_S
    until(engine, lambda: len(engine.answers.get("stranger", ())) == 3)
    assert engine.answers["stranger"] == expected_tokens(text("b", 10), 3)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_peers_wait_for_a_pulled_prefix_and_share_its_blocks(make_engine: MakeEngine, v2: bool, depth: int) -> None:
    engine = make_engine(v2=v2, depth=depth)
    for name in ("first", "peer"):
        engine.remote_tokens[name] = 10 * BLOCK_SIZE
    engine.add("first", prompt(("a", 10), ("first", 1)), LONG)
    engine.turn()
    engine.add("peer", prompt(("a", 10), ("peer", 1)), LONG)
    engine.turn()
    assert status(engine, "peer") is RequestStatus.WAITING
    assert engine.scheduler.decode_report().waiting["prefix"] == 1
    until(engine, lambda: status(engine, "peer") is RequestStatus.RUNNING)
    assert engine.remote_tokens == {"peer": 10 * BLOCK_SIZE}, "the peer found it on the device"
    engine.drain()
    assert engine.answers["peer"] == expected_tokens(prompt(("a", 10), ("peer", 1)), LONG)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_a_request_cancelled_while_its_kv_is_pulled_frees_who_waits_for_it(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    engine.remote_tokens["first"] = 10 * BLOCK_SIZE
    engine.add("first", prompt(("a", 10), ("first", 1)), 2)
    engine.turn()
    assert status(engine, "first") is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.add("peer", prompt(("a", 10), ("peer", 1)), 2)
    engine.turn()
    engine.abort("first")
    assert engine.scheduler.decode_report().loading_requests == 0
    engine.drain()
    assert engine.answers == {"peer": expected_tokens(prompt(("a", 10), ("peer", 1)), 2)}


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("landing_blocks", [0, 1, 4])
def test_what_a_failed_pull_leaves_out_is_computed(
    make_engine: MakeEngine, landing_blocks: int, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    add_group(engine, "a", 2, max_tokens=20)
    engine.remote_tokens["r"] = 9 * BLOCK_SIZE
    engine.scheduler.connector.failing["r"] = landing_blocks * BLOCK_SIZE
    engine.add("r", text("r", 10), 4)
    until(engine, lambda: status(engine, "r") is RequestStatus.WAITING_FOR_REMOTE_KVS)
    until(engine, lambda: len(engine.answers.get("r", ())) == 4, most_turns=10 * LOAD_STEPS)
    assert engine.answers["r"] == expected_tokens(text("r", 10), 4)
    assert engine.runner.failed_loads == 1


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_a_request_that_is_put_back_after_its_pull_failed_reserves_no_blocks(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    scheduler = engine.scheduler
    add_group(engine, "a", 2)
    engine.remote_tokens["r"] = 9 * BLOCK_SIZE
    scheduler.connector.failing["r"] = 0
    engine.add("r", text("r", 10), 4)
    until(engine, lambda: status(engine, "r") is RequestStatus.WAITING_FOR_REMOTE_KVS)
    # After the failure the connector cannot tell for a while what it could load.
    scheduler.connector.undecided["r"] = 5
    until(engine, lambda: scheduler.batching.waits("r"))
    # vLLM's set: a request that stays in it is computed twice.
    assert scheduler.requests["r"] not in scheduler._inflight_prefills
    until(engine, lambda: len(engine.answers.get("r", ())) == 4)
    assert engine.answers["r"] == expected_tokens(text("r", 10), 4)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_requests_that_come_together_pull_what_they_share_once(make_engine: MakeEngine, v2: bool, depth: int) -> None:
    engine = make_engine(v2=v2, depth=depth, decode=GREEDY)
    for name in ("first", "peer", "peer too"):
        engine.remote_tokens[name] = 10 * BLOCK_SIZE
        request = engine.request(name, prompt(("a", 10), (name, 1)), 2)
        request.kv_transfer_params = {"do_remote_prefill": True, DEADLINE_PARAM: monotonic_s() + 30}
        engine.scheduler.add_request(request)
    engine.turn()
    pulled = [
        name for name in engine.scheduler.requests if status(engine, name) is RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    assert pulled == ["first"]
    engine.drain()
    assert set(engine.remote_tokens) == {"peer", "peer too"}, "they found it on the device"
