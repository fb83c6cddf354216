"""Tenants take turns at prompts: tokens by weight, step by step, without credit, and nobody loses what has begun."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.engine_jobs import TenantShare
from cluster_core.tenant_shares import Claimant, FairOrder
from prefill_worker import planning
from prefill_worker.planning import plan_step, victims
from prefill_worker.policies import Contender, Tenure, default, mcps
from prefill_worker.prompt_turns import LATELY_S, Mix, PromptTurns
from tests.planting import planted

BLOCK = 16
STEP = 64


@dataclass
class Prompt:
    name: str
    tenant: TenantShare
    tokens: int
    priority: int = 0
    computed: int = 0
    held_blocks: int = 0
    losses: int = 0


@dataclass
class Engine:
    """Plays steps; `policy` orders the prompts of a tenant."""

    blocks: int = 10_000
    budget: int = STEP
    policy: object = default
    turns: PromptTurns = field(default_factory=PromptTurns)
    prompts: list[Prompt] = field(default_factory=list)
    # By tenant.
    had: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)

    def add(self, name: str, tokens: int, weight: float = 1.0, priority: int = 0) -> None:
        """The tenant is what stands before the dot."""
        self.prompts.append(Prompt(name, TenantShare(name.partition(".")[0], weight), tokens, priority))

    def step(self) -> dict[str, int]:
        contenders = [self.contender(prompt, index) for index, prompt in enumerate(self.prompts)]
        by_policy = self.policy(contenders, 0.0)  # type: ignore[operator]
        ordered = self.turns.order(by_policy)
        self.turns.check_invariants()
        plan = plan_step(ordered, self.budget, self.blocks, 100, BLOCK, begun=self.turns.begun(by_policy))
        tokens = {grant.contender.request_id: grant.tokens for grant in plan.grants}
        self._take_blocks(plan)
        for prompt in self.prompts:
            computed = tokens.get(prompt.name, 0)
            prompt.computed += computed
            prompt.held_blocks = max(prompt.held_blocks, -(-prompt.computed // BLOCK))
            self.had[prompt.tenant.tenant_id] += computed
        self.turns.computed(ordered, tokens)
        self.turns.check_invariants()
        self.ended += [each.name for each in self.prompts if each.computed == each.tokens]
        self.prompts = [each for each in self.prompts if each.computed < each.tokens]
        assert sum(each.held_blocks for each in self.prompts) <= self.blocks
        return tokens

    def _take_blocks(self, plan: planning.StepPlan) -> None:
        by_name = {each.name: each for each in self.prompts}
        needed = sum(
            -(-(each.contender.computed_tokens + each.tokens) // BLOCK) - each.contender.held_blocks
            for each in plan.grants
        )
        for victim in victims(plan.left_out, plan.kept):
            if self.blocks - sum(each.held_blocks for each in self.prompts) >= needed:
                return
            prompt = by_name[victim.request_id]
            prompt.computed, prompt.held_blocks, prompt.losses = 0, 0, prompt.losses + 1

    def contender(self, prompt: Prompt, index: int) -> Contender:
        return Contender(
            prompt.name, True, float(index), 0.0, inf, prompt.computed, Tenure.WAITING, index,
            remaining_tokens=prompt.tokens - prompt.computed, known_tokens=prompt.tokens,
            held_blocks=prompt.held_blocks, priority=prompt.priority, tenant=prompt.tenant,
            left_tokens=prompt.tokens - prompt.computed,
        )  # fmt: skip


weights = st.lists(st.sampled_from([0.25, 1.0, 3.0, 0.0]), min_size=2, max_size=4)
sizes = st.lists(st.integers(2, 400), min_size=1, max_size=5)


def unfairness(given_weights: list[float], given_sizes: list[int], steps: int = 40) -> float:
    """By how much two tenants that always wait differ at most, over any stretch, beyond a step of each."""
    engine = Engine()
    tenants = "abcd"[: len(given_weights)]
    part = dict(zip(tenants, (each or 1.0 for each in given_weights), strict=True))
    number = 0
    ahead = {(one, other): [0.0] for one in tenants for other in tenants if one < other}
    for _ in range(steps):
        for tenant, weight in zip(tenants, given_weights, strict=True):
            while sum(each.tokens for each in engine.prompts if each.tenant.tenant_id == tenant) < 500:
                number += 1
                engine.add(f"{tenant}.{number}", given_sizes[number % len(given_sizes)], weight)
        engine.step()
        for (one, other), differences in ahead.items():
            differences.append(engine.had[one] / part[one] - engine.had[other] / part[other])
    return max(max(each) - min(each) - STEP / part[one] - STEP / part[other] for (one, other), each in ahead.items())


@given(weights, sizes)
def test_who_waits_gets_tokens_by_weight_but_for_a_step_of_each(
    given_weights: list[float], given_sizes: list[int]
) -> None:
    assert unfairness(given_weights, given_sizes) <= 1e-6


def test_turns_without_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, TenantShare, "part", 1.0)
    assert unfairness([0.25, 3.0], [100]) > 300


def waits_for_steps(engine: Engine, name: str, tokens: int) -> int:
    """How many steps a prompt takes from when it comes."""
    engine.add(name, tokens)
    for steps in range(1, 1000):
        engine.step()
        if name in engine.ended:
            return steps
    raise AssertionError("it is never computed")


def flooded() -> Engine:
    """A tenant has had the engine for itself for a while, and goes on."""
    engine = Engine()
    for number in range(80):
        engine.add(f"flood.{number}", 3000)
    for _ in range(200):
        engine.step()
    return engine


def test_one_that_asks_little_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are in the next step, each time."""

    def waits(engine: Engine) -> list[int]:
        found = []
        for number in range(5):
            found.append(waits_for_steps(engine, f"few.{number}", STEP))
            for _ in range(7):
                engine.step()
        return found

    assert waits(flooded()) == [1] * 5

    # Nothing else tells it that a tenant has had something.
    charge = PromptTurns._charge

    def charge_beside_others_alone(self: PromptTurns, had: Counter[Claimant]) -> None:
        if len(self._weights) > 1:
            charge(self, had)

    # A planted bug: what it had while it was alone does not count.
    planted(monkeypatch, PromptTurns, "_charge", charge_beside_others_alone)
    assert waits(flooded()) != [1] * 5


def test_who_was_away_has_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    def share_after_a_pause() -> int:
        engine = Engine()
        waits_for_steps(engine, "pauses.0", 10)
        engine = flooded() if not engine.prompts else engine
        for number in range(40):
            engine.add(f"pauses.{number}", 300)
        before = engine.had["pauses"]
        for _ in range(60):
            engine.step()
        return (engine.had["pauses"] - before) // STEP

    assert share_after_a_pause() in (29, 30, 31)

    # A planted bug: it starts where it would have been if it had never had anything.
    planted(monkeypatch, FairOrder, "comes", lambda self, tenant: self._starts.setdefault(tenant, 0.0))
    assert share_after_a_pause() == 60


def test_a_trickle_is_no_credit() -> None:
    """Of one that always has a little, all of which is computed at once, and then has much."""
    engine = flooded()
    for number in range(100):
        engine.add(f"trickles.{number}", 8)
        engine.step()
    for number in range(40):
        engine.add(f"trickles.more.{number}", 300)
    before = engine.had["trickles"]
    for _ in range(60):
        engine.step()
    assert engine.had["trickles"] - before <= 31 * STEP


def test_a_lower_number_goes_first_and_each_priority_has_its_own_turns() -> None:
    engine = Engine()
    engine.add("a.batch", 200, priority=1)
    engine.add("b.batch", 200, priority=1)
    engine.step()
    engine.add("a.urgent", 100)
    assert next(iter(engine.step())) == "a.urgent"
    assert next(iter(engine.step())) == "a.urgent"
    while engine.prompts:
        engine.step()
    assert engine.ended[0] == "a.urgent"


def test_one_tenant_has_the_order_of_the_policy() -> None:
    turns = PromptTurns()
    engine = Engine(policy=mcps)
    engine.add("a.1", 100)
    engine.add("a.2", 200)
    engine.prompts[1].computed, engine.prompts[1].held_blocks = 50, 4
    contenders = [engine.contender(prompt, index) for index, prompt in enumerate(engine.prompts)]
    by_policy = mcps(contenders, 0.0)
    assert turns.order(by_policy) == by_policy
    assert turns.begun(by_policy) == [], "nobody else takes turns"


# Memory.


def two_that_do_not_fit_together() -> Engine:
    """Each needs six of ten blocks for longer than a turn."""
    engine = Engine(blocks=40, budget=STEP)
    for number in range(3):
        for tenant in "ab":
            engine.add(f"{tenant}.{number}", 24 * BLOCK)
    return engine


def test_prompts_that_do_not_fit_together_are_ended_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = two_that_do_not_fit_together()
    for _ in range(6 * 6):
        engine.step()
    assert len(engine.ended) == 6 and engine.had.total() == 6 * 24 * BLOCK
    assert [one[0] != other[0] for one, other in pairwise(engine.ended)] == [True] * 5

    # A planted bug: nothing is kept.
    planted(monkeypatch, PromptTurns, "begun", lambda self, by_policy: [])
    engine = two_that_do_not_fit_together()
    for _ in range(100):
        engine.step()
    assert engine.had.total() > 6 * 24 * BLOCK, "some of it was computed twice"


def test_what_has_begun_is_taken_by_a_lower_priority_number_alone() -> None:
    engine = Engine(blocks=40)
    engine.add("a.begun", 24 * BLOCK, priority=1)
    engine.step()
    engine.add("b.other", 24 * BLOCK, priority=1)
    engine.step()
    assert not engine.prompts[0].losses and not engine.prompts[1].computed
    engine.add("b.urgent", 24 * BLOCK)
    assert next(iter(engine.step())) == "b.urgent"
    while engine.prompts:
        engine.step()
    assert engine.ended[0] == "b.urgent"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(2, 500), st.sampled_from([-1, 0, 0, 1]), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    ),
    st.integers(32, 80),
    st.sampled_from([default, mcps]),
)
def test_everybody_is_computed_in_the_end(
    arrivals: list[tuple[str, int, int, int]], blocks: int, policy: object
) -> None:
    """And nobody's prompt is computed again and again: at most once for each that came with a lower number."""
    engine = Engine(blocks=blocks, policy=policy)
    losses = 0
    for now in range(21 + 14 * len(arrivals) * 12):
        for number, (tenant, tokens, priority, step) in enumerate(arrivals):
            if step == now:
                engine.add(f"{tenant}.{number}", tokens, priority=priority)
        if engine.prompts:
            before = sum(each.losses for each in engine.prompts)
            engine.step()
            losses += max(0, sum(each.losses for each in engine.prompts) - before)
        elif now > 20:
            break
    assert len(engine.ended) == len(arrivals)


def test_kept_blocks_are_the_last_to_be_taken() -> None:
    def left(name: str, held: int) -> Contender:
        return Contender(name, True, 0.0, 0.0, inf, 0, Tenure.RUNNING, 0, held_blocks=held)

    left_out = [left("parked", 3), left("kept", 3), left("nothing", 0)]
    assert [each.request_id for each in victims(left_out)] == ["kept", "parked"]
    assert [each.request_id for each in victims(left_out, {"kept"})] == ["parked", "kept"]


def test_what_cannot_be_taken_keeps_what_it_will_need_as_well() -> None:
    def contender(name: str, tokens: int, held: int, *, evictable: bool = True) -> Contender:
        made = Contender(name, True, 0.0, 0.0, inf, held * BLOCK, Tenure.RUNNING, 0)
        made.remaining_tokens, made.known_tokens = tokens - held * BLOCK, tokens
        made.held_blocks, made.evictable = held, evictable
        return made

    begun, newcomer = contender("begun", 6 * BLOCK, 2, evictable=False), contender("new", 6 * BLOCK, 0)
    plan = plan_step([newcomer, begun], 1000, 10, 9, BLOCK)
    assert [each.contender for each in plan.grants] == [newcomer]
    plan = plan_step([newcomer, begun], 1000, 10, 9, BLOCK, begun=[begun])
    assert [each.contender for each in plan.grants] == [begun]
    plan = plan_step([newcomer, begun], 1000, 12, 9, BLOCK, begun=[begun])
    assert [each.contender for each in plan.grants] == [newcomer, begun]


# Who is here.


def looked(mix: Mix, now_s: float) -> bool:
    mix.look(now_s)
    mix.check_invariants()
    return mix.is_mixed


def test_a_mix_lasts_for_a_while() -> None:
    mix = Mix()
    for _ in range(2):
        mix.came("1", 0, TenantShare("a", 2.0))
    assert not looked(mix, 0.0)
    assert mix.alone == ((0, "a"), 2.0)
    mix.came("2", 0, TenantShare("b"))
    assert looked(mix, 1.0)
    for _ in range(2):
        mix.left("2")
    assert looked(mix, 0.9 + LATELY_S)
    assert not looked(mix, 1.0 + LATELY_S)
    mix.came("3", 1, TenantShare("a"))
    assert looked(mix, 50.0), "another priority"


def alone(mix: Mix) -> tuple[Claimant, float] | None:
    return mix.alone


def test_several_are_not_alone_and_the_last_one_leaves_nobody() -> None:
    mix = Mix()
    assert alone(mix) is None
    mix.came("1", 0, TenantShare("a", 0.0))
    assert alone(mix) == ((0, "a"), 1.0)
    mix.came("2", 0, TenantShare("b"))
    assert alone(mix) is None
    mix.left("2")
    mix.left("1")
    assert alone(mix) is None


def test_what_was_computed_without_a_plan_counts() -> None:
    engine = Engine()
    for _ in range(3):
        engine.turns.computed_alone(Claimant(0, "flood"), 1.0, 5000)
    engine.add("flood.1", 3000)
    assert waits_for_steps(engine, "few.1", STEP) == 1
    # Who had been alone is gone.
    engine.turns.computed_alone(Claimant(0, "another"), 1.0, 5000)
    engine.turns.check_invariants()
