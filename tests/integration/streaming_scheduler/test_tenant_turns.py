"""Tenants and priorities take turns at the steps of a prefill worker, with and without sessions beside them."""

import random
from collections import Counter
from typing import Any

import pytest

from cluster_core.engine_jobs import NOBODY, TenantShare
from cluster_core.tenant_shares import Claimant, FairOrder
from prefill_worker import turn_taking, two_phase
from prefill_worker.policies import POLICIES
from prefill_worker.prompt_turns import LATELY_S, PromptTurns
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.stock_steps import names_by_free_order, runner_view
from tests.integration.streaming_scheduler.sessions import (
    EVERY_PROTOCOL,
    MakeEngine,
    held_blocks,
    park,
    scheduled_next,
    text,
    until,
)
from tests.planting import planted

pytestmark = pytest.mark.integration

A, B = TenantShare("a"), TenantShare("b")


def flood(engine: SimulatedEngine, tenant: TenantShare, count: int = 8, tokens: int = 150, **fields: Any) -> None:
    for number in range(count):
        name = f"{tenant.tenant_id}{number}"
        engine.add(name, text(name, tokens), tenant=tenant, **fields)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_priorities_are_heeded_while_no_session_is_open(
    make_engine: MakeEngine, v2: bool, depth: int, policy: str
) -> None:
    engine = make_engine(v2=v2, depth=depth, policy=policy, token_budget=24, blocks=60)
    engine.add("batch", text("batch", 300), priority=1)
    until(engine, lambda: bool(held_blocks(engine, "batch")))
    engine.add("urgent", text("urgent", 60))
    engine.outputs.clear()
    until(engine, lambda: "urgent" in engine.answers)
    steps = [output.num_scheduled_tokens for output in engine.outputs[:3]]
    assert steps == [{"urgent": 24}, {"urgent": 24}, {"urgent": 12, "batch": 12}]
    engine.drain()
    assert engine.answers["batch"] == expected_tokens(text("batch", 300), 1)


def test_one_that_asks_little_is_in_the_next_step(make_engine: MakeEngine) -> None:
    """However many wait of another tenant, each time."""
    engine = make_engine(token_budget=24, blocks=100, places=12)
    flood(engine, A)
    for _ in range(6):
        engine.turn()
    for number in range(4):
        engine.add(f"few {number}", text(f"few {number}", 24), tenant=B)
        assert scheduled_next(engine) == [f"few {number}"]
        for _ in range(3):
            assert scheduled_next(engine)[0][0] == "a"


def test_steps_are_short_while_others_may_come_and_for_a_while_after(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    # As if its steps had been measured: a short one has a block.
    engine = make_engine(token_budget=96, blocks=200, is_measured=True, policy="default", places=12)
    flood(engine, A, 12, tokens=240)
    assert sum(_next_tokens(engine).values()) == 96, "nobody else is here"
    engine.add("few", text("few", 30), tenant=B)
    assert _next_tokens(engine) == {"few": BLOCK_SIZE}
    until(engine, lambda: "few" in engine.answers)
    clock.advance(LATELY_S - 0.1)
    assert sum(_next_tokens(engine).values()) == BLOCK_SIZE
    clock.advance(0.2)
    engine.turn()
    assert sum(_next_tokens(engine).values()) == 96


def _next_tokens(engine: SimulatedEngine) -> dict[str, int]:
    engine.turn()
    tokens: dict[str, int] = engine.outputs[-1].num_scheduled_tokens
    return tokens


@pytest.mark.parametrize("open_for", ["a", "b"])
def test_turns_are_taken_while_a_session_is_open(make_engine: MakeEngine, open_for: str, clock: SteppedClock) -> None:
    """Also at what a session has so far, beside prompts of others that are whole."""
    engine = make_engine(token_budget=24, blocks=120, places=12, policy="default")
    whose = {"a": A, "b": B}[open_for]
    engine.open("session", text("session", 97), tenant=whose)
    flood(engine, A)
    computed: Counter[str] = Counter()
    for _ in range(8):
        computed.update(_next_tokens(engine))
    beside = computed["session"]
    assert beside == (96 if whose is B else 0), "its own tenant's whole prompts go before it, those of others do not"
    engine.add("few", text("few", 24), tenant=B)
    assert any("few" in _next_tokens(engine) for _ in range(2))


def test_prompts_that_do_not_fit_together_do_not_take_blocks_from_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="fcfs", preemption="recompute", token_budget=24, blocks=24, places=6)
    prompts = {f"{tenant}{number}": text((tenant, number), 220) for number in range(3) for tenant in "ab"}
    for name, prompt in prompts.items():
        engine.add(name, prompt, tenant=TenantShare(name[0]))
    engine.drain()
    assert engine.answers == {name: expected_tokens(prompt, 1) for name, prompt in prompts.items()}
    computed = sum(sum(output.num_scheduled_tokens.values()) for output in engine.outputs)
    assert computed == sum(map(len, prompts.values())), "some of it was computed twice"


def test_what_is_parked_loses_its_blocks_before_what_has_begun(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="fcfs", preemption="recompute", token_budget=24, blocks=24, places=6)
    park(engine, "idle", text("idle", 97))
    engine.scheduler.extend_prompt("idle", [])
    engine.add("a", text("a", 200), tenant=A)
    engine.turn()
    engine.add("b", text("b", 120), tenant=B)
    until(engine, lambda: {"a", "b"} <= engine.answers.keys())
    assert not engine.scheduler.session_ledger("idle").preemptions_swap
    computed = Counter[str]()
    for output in engine.outputs:
        computed.update(output.num_scheduled_tokens)
    assert (computed["a"], computed["b"]) == (200, 120)


@pytest.mark.parametrize("depth", [1, 2])
def test_models_without_sessions_keep_vllms_order(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # No model of the tests' keeps its KV in any other way.
    monkeypatch.setattr(turn_taking, "allows", lambda layout, feature: False)
    world = World(depth=depth, tiers=False, blocks=60, places=4, token_budget=24)
    stock = next(each for each in world.scheduler_class.__mro__ if each.__module__.startswith("vllm"))
    engines = SimulatedEngine(world, stock), SimulatedEngine(world)
    names = [names_by_free_order(engine) for engine in engines]
    for number in range(8):
        for engine in engines:
            engine.add(str(number), text(number, 80), tenant=(A, B)[number % 2], priority=number % 3)
    for _ in range(60):
        turned = [engine.turn() for engine in engines]
        assert turned[0] == turned[1]
    views = [
        [runner_view(each, known) for each in engine.outputs] for engine, known in zip(engines, names, strict=True)
    ]
    assert views[0] == views[1]
    assert len(engines[1].answers) == 8


# What random traffic gets.


def unfairness(seed: int) -> float:
    """By how much two tenants that both always have prompts waiting differ, over any stretch, beyond three steps each:
    one that is planned, and what is under way."""
    rng = random.Random(seed)
    world = World(
        v2=rng.random() < 0.5, depth=rng.choice((1, 2)), policy=rng.choice(list(POLICIES)), blocks=400, places=30,
        token_budget=64, host_slots=0, starvation_s=0.05,
    )  # fmt: skip
    engine, steps = SimulatedEngine(world), 2 * world.depth + 1
    shares = [TenantShare(f"t{number}", rng.choice((0.25, 1.0, 4.0))) for number in range(rng.randint(2, 3))]
    whose: dict[str, TenantShare] = {}
    had = dict.fromkeys(shares, 0.0)
    ahead: dict[tuple[TenantShare, TenantShare], list[float]] = {
        (one, other): [0.0] for one in shares for other in shares if one.tenant_id < other.tenant_id
    }
    if rng.random() < 0.5:
        engine.open("session", text("session", 20), tenant=rng.choice(shares))
        whose["session"] = NOBODY
    for _ in range(150):
        for share in shares:
            while _waiting_tokens(engine, whose, share) < 4 * world.token_budget:
                name = str(len(whose))
                whose[name] = share
                engine.add(name, text((seed, name), rng.randrange(2, 150)), tenant=share)
        known = len(engine.outputs)
        engine.turn()
        for output in engine.outputs[known:]:
            for name, tokens in output.num_scheduled_tokens.items():
                if whose[name] in had:
                    had[whose[name]] += tokens / whose[name].weight
            for (one, other), differences in ahead.items():
                differences.append(had[one] - had[other])
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    most = {share: steps * world.token_budget / share.weight for share in shares}
    return max(max(each) - min(each) - most[one] - most[other] for (one, other), each in ahead.items())


def _waiting_tokens(engine: SimulatedEngine, whose: dict[str, TenantShare], share: TenantShare) -> int:
    return sum(
        request.num_tokens - request.num_computed_tokens
        for name, request in engine.scheduler.requests.items()
        if whose[name] is share
    )


SEEDS = range(6)


def test_tenants_get_tokens_by_weight_over_any_stretch() -> None:
    for seed in SEEDS:
        assert unfairness(seed) <= 1e-6, seed


def test_lost_weights_and_lost_tenants_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        planted(context, TenantShare, "part", 1.0)
        assert any(unfairness(seed) > 0 for seed in SEEDS)
    planted(monkeypatch, two_phase, "tenant_of", lambda request: NOBODY)
    assert any(unfairness(seed) > 0 for seed in SEEDS)


def steps_until_few_are_answered(make_engine: MakeEngine) -> list[int]:
    engine = make_engine(token_budget=24, blocks=200, places=24)
    flood(engine, A, 20, tokens=150)
    for _ in range(12):
        engine.turn()
    found = []
    for number in range(3):
        engine.add(f"few {number}", text(f"few {number}", 24), tenant=B)
        known = len(engine.outputs)
        until(engine, lambda number=number: f"few {number}" in engine.answers)  # type: ignore[misc]
        found.append(len(engine.outputs) - known)
        for _ in range(6):
            engine.turn()
    return found


def test_what_a_tenant_had_alone_counts_and_a_pause_is_no_credit(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_until_few_are_answered(make_engine) == [1, 1, 1]
    # Nothing else tells it that a tenant has had something.
    charge = PromptTurns._charge

    def charge_beside_others_alone(self: PromptTurns, had: Counter[Claimant]) -> None:
        if len(self._weights) > 1:
            charge(self, had)

    with monkeypatch.context() as context:
        planted(context, PromptTurns, "_charge", charge_beside_others_alone)
        assert max(steps_until_few_are_answered(make_engine)) > 1
    # Credit: who comes after a long time has all steps for as long.
    assert _steps_of_who_came_late(make_engine) <= 7
    planted(monkeypatch, FairOrder, "comes", lambda self, tenant: self._starts.setdefault(tenant, 0.0))
    assert _steps_of_who_came_late(make_engine) >= 11


def _steps_of_who_came_late(make_engine: MakeEngine) -> int:
    """Of twelve steps, beside one that has had as many."""
    engine = make_engine(token_budget=24, blocks=300, places=24)
    engine.add("first", text("first", 24), tenant=B)
    flood(engine, A, 20, tokens=150)
    for _ in range(40):
        engine.turn()
    flood(engine, B, 6, tokens=150)
    return sum(scheduled_next(engine)[0][0] == "b" for _ in range(12))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tenants", [2, 10])
def test_a_session_is_computed_once_beside_floods_of_whole_prompts_where_memory_is_short(
    make_engine: MakeEngine, clock: SteppedClock, policy: str, tenants: int
) -> None:
    """It was once computed for ever: each tenant's next prompt took its blocks."""
    engine = make_engine(
        policy=policy, preemption="recompute", token_budget=24, blocks=26, places=16, starvation_s=0.2, host_slots=0,
        tiers=False,
    )  # fmt: skip
    engine.open("session", text("session", 300), tenant=A)
    number = 0
    for _ in range(600):
        present = {name.partition(".")[0] for name in engine.scheduler.requests}
        for tenant in range(tenants):
            if f"t{tenant}" not in present:
                number += 1
                name = f"t{tenant}.{number}"
                engine.add(name, text(name, 150), tenant=TenantShare(f"t{tenant}"))
        engine.turn()
        clock.advance(0.01)
        if engine.scheduler.requests["session"].num_computed_tokens >= 299:
            break
    computed = sum(output.num_scheduled_tokens.get("session", 0) for output in engine.outputs)
    assert computed == 299, "it is held back by a token while it takes input"


@pytest.mark.parametrize("step_s", [0.005, 0.010, 0.020, 0.030])
@pytest.mark.parametrize("mixed", ["tenants", "priorities"])
def test_mixed_traffic_keeps_most_of_the_engine_whatever_any_step_costs(
    make_engine: MakeEngine, clock: SteppedClock, mixed: str, step_s: float
) -> None:
    """After a warm-up by prompts of one token, whose steps say nothing of what tokens cost."""
    engine = make_engine(token_budget=2048, blocks=4000, places=32)
    carry_out = engine.runner.step

    def step(output: Any) -> Any:
        clock.advance(step_s + output.total_num_scheduled_tokens / 40_000)
        return carry_out(output)

    # A step takes time, by what is in it.
    engine.runner.step = step  # type: ignore[method-assign]
    engine.add("warm", [0], 2)
    engine.drain()
    began_s = clock.now_s
    for number in range(40):
        its: dict[str, Any] = {"tenant": (A, B)[number % 2]} if mixed == "tenants" else {"priority": number % 2}
        engine.add(str(number), text(number, 1000), **its)
    engine.drain()
    alone_s = 40_000 / 2048 * step_s + 1.0
    assert clock.now_s - began_s <= alone_s / 0.75
