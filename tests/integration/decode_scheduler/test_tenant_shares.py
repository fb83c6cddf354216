"""Of several tenants none gets far ahead in a decode batch, whatever its requests share."""

from dataclasses import replace

import pytest

from cluster_core.engine_jobs import NOBODY, TenantShare
from decode_worker import batch_scheduling
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.integration.decode_scheduler.requests import EVERY_PROTOCOL, GREEDY, SETTINGS, MakeEngine, begun, prompt
from tests.planting import planted

pytestmark = pytest.mark.integration

# Of three prompts of the flood.
SLACK_TOKENS = 3 * 12 * BLOCK_SIZE
FLOOD = TenantShare("flood", 0.1)
FEW = TenantShare("few", 1.0)


def flooded(make_engine: MakeEngine, policy: str, v2: bool = False, depth: int = 1) -> SimulatedEngine:
    """Twenty requests of one tenant that share a prefix, then one of another that shares nothing with them."""
    settings = replace(SETTINGS, policy=policy, slack_tokens=SLACK_TOKENS)
    engine = make_engine(v2=v2, depth=depth, places=2, decode=settings)
    for number in range(20):
        engine.add(f"flood{number}", prompt(("a", 10), (number, 2)), 4, tenant=FLOOD)
    for _ in range(4):
        engine.turn()
    engine.add("few", prompt(("b", 11)), 4, tenant=FEW)
    engine.drain()
    return engine


@pytest.mark.parametrize("policy", ["greedy", "heuristic", "bandit"])
@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_one_that_asks_little_passes_those_that_share_more(
    make_engine: MakeEngine, policy: str, v2: bool, depth: int
) -> None:
    engine = flooded(make_engine, policy, v2, depth)
    assert begun(engine).index("few") <= 2 + depth + 4
    assert engine.scheduler.decode_report().admissions["share"] >= 1
    assert engine.answers["few"] == expected_tokens(prompt(("b", 11)), 4)
    assert len(engine.answers) == 21


def test_workers_that_do_not_hear_whose_requests_are_are_found(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, batch_scheduling, "tenant_of", lambda request: NOBODY)
    assert begun(flooded(make_engine, "greedy")).index("few") > 12


def test_lost_weights_are_found(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_light_one() -> int:
        engine = make_engine(places=2, decode=replace(GREEDY, slack_tokens=SLACK_TOKENS))
        for number in range(20):
            for share in (TenantShare("light", 0.2), TenantShare("heavy", 1.0)):
                engine.add(f"{share.tenant_id}{number}", prompt((share.tenant_id, 10), (number, 2)), 4, tenant=share)
        engine.drain()
        return sum(name.startswith("light") for name in begun(engine)[:20])

    assert of_light_one() <= 4 + 3
    planted(monkeypatch, TenantShare, "part", 1.0)
    assert of_light_one() >= 8


def test_a_probe_heeds_shares_as_well(make_engine: MakeEngine) -> None:
    guarded = replace(GREEDY, slack_tokens=SLACK_TOKENS, guard=True, probe_interval_s=0.02, probe_s=0.5, fallback_s=0.5)
    engine = make_engine(places=2, decode=guarded)
    for number in range(30):
        engine.add(f"flood{number}", prompt((number, 12)), 8, tenant=FLOOD)
    modes = set()
    for number in range(200):
        if number == 60:
            engine.add("few", prompt(("b", 11)), 4, tenant=FEW)
        engine.turn()
        modes.add(engine.scheduler.decode_report().mode)
        engine.check_invariants()
    engine.drain()
    report = engine.scheduler.decode_report()
    assert "probe" in modes and report.admissions["fcfs"] > 0
    assert len(engine.answers) == 31


def test_who_is_preempted_lets_others_of_its_tenant_pass(make_engine: MakeEngine) -> None:
    """In a pool so small that somebody is preempted all the time, everybody is answered."""
    engine = make_engine(blocks=24, places=4, decode=replace(SETTINGS, slack_tokens=SLACK_TOKENS))
    prompts = {f"{tenant}{number}": prompt((tenant, 3), (number, 2)) for number in range(4) for tenant in "ab"}
    for name, its in prompts.items():
        engine.add(name, its, 60, tenant=TenantShare(name[0], 0.01))
    engine.drain()
    assert any(output.preempted_req_ids for output in engine.outputs)
    assert engine.answers == {name: expected_tokens(its, 60) for name, its in prompts.items()}
