"""A scheduler that does both: tenants take turns at prompts, and none gets far ahead in the decode batch."""

from dataclasses import replace

import pytest

from cluster_core.engine_jobs import TenantShare
from kv_transfer.blocks import Tier
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.integration.decode_scheduler.requests import begun, text, until
from tests.integration.shared_scheduler.conftest import GREEDY, MakeEngine

pytestmark = pytest.mark.integration

PULLS = {"do_remote_prefill": True}
HANDS_OFF = {"do_remote_decode": True}
A, B = TenantShare("a"), TenantShare("b")


def flood(engine: SimulatedEngine, count: int, blocks: int = 20, max_tokens: int = 2, share: TenantShare = A) -> None:
    for number in range(count):
        engine.add(f"a{number}", text(f"a{number}", blocks), max_tokens, tenant=share)


def next_step(engine: SimulatedEngine) -> dict[str, int]:
    known = len(engine.outputs)
    until(engine, lambda: len(engine.outputs) > known, most_turns=3)
    tokens: dict[str, int] = engine.outputs[-1].num_scheduled_tokens
    return tokens


@pytest.mark.parametrize("tpot_s", [0.0, 0.05])
@pytest.mark.parametrize("is_session", [False, True])
def test_prompts_of_tenants_take_turns(make_engine: MakeEngine, tpot_s: float, is_session: bool) -> None:
    engine = make_engine(token_budget=64, places=12, tpot_s=tpot_s, is_measured=True)
    if is_session:
        engine.open("session", text("session", 2), tenant=B)
    flood(engine, 6)
    for _ in range(6):
        engine.turn()
    engine.add("few", text("few", 1), 3, tenant=B)
    assert "few" in {name for _ in range(2) for name in next_step(engine)}
    engine.drain()
    assert engine.answers["few"] == expected_tokens(text("few", 1), 3)
    assert engine.answers["a5"] == expected_tokens(text("a5", 20), 2)


def test_prompts_for_other_workers_take_turns_as_well(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=64, places=12)
    for number in range(6):
        engine.add(f"a{number}", text(f"a{number}", 20), 1, transfer=dict(HANDS_OFF), tenant=A)
    for _ in range(4):
        engine.turn()
    engine.add("few", text("few", 4), 1, transfer=dict(HANDS_OFF), tenant=B)
    assert "few" in next_step(engine)
    engine.drain()


def test_leases_that_begin_alike_leave_the_memory_that_they_do_not_hold(make_engine: MakeEngine) -> None:
    """What they share is there once, and a prompt that begins so as well needs no other blocks for it."""
    engine = make_engine(blocks=40, places=12, token_budget=96)
    common = text("common", 8)
    for number in range(4):
        prompt = [*common, *text(f"leased {number}", 1), 0]
        engine.add(f"leased {number}", prompt, 1, transfer=dict(HANDS_OFF), tenant=A)
    until(engine, lambda: len(engine.answers) == 4)
    assert engine.free_blocks() == 39 - 8 - 4 * 2
    engine.open("session", text("session", 1), tenant=A)
    assert engine.free_blocks() < 8 + 16
    engine.add("asks", [*common, *text("asks", 16)], 1, tenant=B)
    # The first one looks up what the cache has of it, the next ones go by what it holds.
    assert [next_step(engine).get("asks", 0) > 0 for _ in range(2)] == [True, True]
    assert not engine.runner.read_leases
    engine.drain()


def test_what_decodes_and_what_is_pulled_is_no_turn(make_engine: MakeEngine) -> None:
    """Each has its token of every step, whosever prompts are computed."""
    engine = make_engine(token_budget=64, places=12, is_measured=True)
    engine.add("decodes", text("decodes", 1), 200, tenant=A)
    until(engine, lambda: bool(engine.answers.get("decodes")))
    for number in range(4):
        engine.add(f"b{number}", text(f"b{number}", 20), 2, tenant=B)
    engine.remote_tokens["pulled"] = 10 * BLOCK_SIZE
    engine.add("pulled", text("pulled", 10), 3, transfer=dict(PULLS), tenant=A)
    for _ in range(10):
        assert next_step(engine)["decodes"] == 1
    until(engine, lambda: len(engine.answers.get("pulled", ())) == 3)
    engine.drain()
    assert engine.answers["pulled"] == expected_tokens(text("pulled", 10), 3)


def test_none_gets_far_ahead_in_the_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(places=2, decode=replace(GREEDY, slack_tokens=3 * 12 * BLOCK_SIZE))
    flood(engine, 20, 12, 4, TenantShare("a", 0.1))
    for _ in range(4):
        engine.turn()
    engine.add("few", text("few", 11), 4, tenant=B)
    engine.drain()
    assert begun(engine).index("few") <= 7
    assert len(engine.answers) == 21


def test_what_decodes_is_charged_to_no_prompts_of_its_tenant(make_engine: MakeEngine) -> None:
    """Who decodes much has its prompts as early as others."""
    engine = make_engine(token_budget=96, places=40, blocks=900)
    for number in range(24):
        engine.add(f"decodes {number}", text(f"d{number}", 1)[:4], 300, tenant=A)
    until(engine, lambda: len(begun(engine)) == 24)
    had, number = {"a": 0, "b": 0}, 0
    for _ in range(60):
        for tenant, share in (("a", A), ("b", B)):
            while sum(name[0] == tenant and name not in begun(engine) for name in engine.scheduler.requests) < 2:
                number += 1
                engine.add(f"{tenant}{number}", text(f"{tenant}{number}", 20), 1, tenant=share)
        for name, tokens in next_step(engine).items():
            if name[0] in had:
                had[name[0]] += tokens
    assert abs(had["a"] - had["b"]) <= 4 * 96


def test_the_newest_turn_of_a_conversation_and_its_answer_are_its_tenants_share(make_engine: MakeEngine) -> None:
    """Computed at once, so it is counted once it is cached; the other tenant has asked for all of its own again."""
    engine = make_engine(tiers=True)
    turns = [text("chat", 2), [*text("chat", 2), *text("next", 2)]]
    for number, turn in enumerate(turns):
        engine.add(f"turn {number}", [*turn, 0], BLOCK_SIZE * 2 * number + 1, tenant=A)
        until(engine, lambda: not engine.scheduler.requests)
    for number in range(2):
        engine.add(f"flood {number}", [*text("flood", 20), 0], 1, tenant=B)
        until(engine, lambda: not engine.scheduler.requests)
    engine.add("after", [1], 1, tenant=B)
    until(engine, lambda: not engine.scheduler.requests)
    tiers = engine.scheduler.tiers
    coldest = tiers.tree.node_of(Tier.DEVICE, tiers.coldest_device_block())
    assert coldest.owner.tenant_id == B.tenant_id
