"""Swapped sessions that come back beside steps.

Real schedulers without a model, on a clock that is moved by hand (`simulated`), whose runner carries out what copies in
the background are told to, some steps late.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster_configs.preemption_costs import CostModel, LatencyCurve
from decode_worker.batch_settings import BatchSettings
from prefill_worker.policies import POLICIES
from prefill_worker.streaming_request import LOADING
from tests.campaign.fuzz import kv_checking_runner
from tests.campaign.fuzz.kv_checking_runner import adapter, expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.streaming_scheduler.sessions import preempted_by_swap, until
from tests.integration.test_async_loads import scheduled, status
from tests.integration.test_streaming_fairness import numbered, turn
from tests.integration.test_streaming_host_hits import in_host_memory_only

pytestmark = pytest.mark.integration

# The token that is held back is computed when the session's input is closed.
PROMPT = numbered(5, 905)
REST = numbered(3, 10)
_STEP_S = 0.01
BLOCKS = -(-(len(PROMPT) - 1) // BLOCK_SIZE)
_PLAIN = World(blocks=141, host_slots=400, token_budget=1024, copy_s=0.02, eviction="lru", promotion=False)
WORLDS = {
    "streaming": _PLAIN,
    "streaming v2": replace(_PLAIN, v2=True),
    "two steps at once": replace(_PLAIN, v2=True, depth=2),
    "both": replace(_PLAIN, decode=BatchSettings(chunk_tokens=BLOCK_SIZE), is_shared=True),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedClock]:
    # Every copy in the background takes so many steps.
    monkeypatch.setattr(kv_checking_runner, "_BACKGROUND_STEPS", (3,))
    with SteppedClock() as stepped:
        yield stepped


@pytest.fixture(params=WORLDS)
def engine(request: pytest.FixtureRequest, clock: SteppedClock) -> SimulatedEngine:
    engine = swapped(WORLDS[request.param], clock)
    decodes(engine, clock)
    return engine


def swapped(world: World, clock: SteppedClock, **fields: Any) -> SimulatedEngine:
    """In which copies have been timed, and a session lies in host memory."""
    engine = SimulatedEngine(world)
    in_host_memory_only(engine, clock, numbered(1, 320))
    preempted_by_swap(engine, "session", PROMPT, **fields)
    engine.outputs.clear()
    return engine


def decodes(engine: SimulatedEngine, clock: SteppedClock) -> None:
    engine.add("decodes", numbered(7, 40), max_tokens=60)
    for _ in range(4):
        turn(engine, clock)
    assert engine.answers["decodes"]
    engine.outputs.clear()


def sync_copies(engine: SimulatedEngine) -> int:
    return sum(len(output.kv_connector_metadata.rachis_swap_copies.back) for output in engine.outputs)


def test_others_are_computed_while_a_swapped_session_comes_back(engine: SimulatedEngine, clock: SteppedClock) -> None:
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    swaps = engine.scheduler.swaps
    assert (swaps.tokens("session"), swaps.used_slots) == (0, 0)
    assert swaps.free_slots == engine.world.host_slots - BLOCKS, "its slots are read still"
    engine.drain()

    assert not sync_copies(engine)
    first = next(step for step, tokens in enumerate(scheduled(engine, "session")) if tokens)
    assert first > 1
    assert scheduled(engine, "decodes")[:first] == [1] * first
    assert scheduled(engine, "session")[first] == 1 + len(REST)
    assert engine.answers["session"] == expected_tokens([*PROMPT, *REST], 1)
    assert swaps.counters.blocks_back == swaps.counters.blocks_back_async == BLOCKS
    counters = engine.scheduler.tiers.counters
    assert counters.copied_back == counters.copied_back_async == BLOCKS, "their seconds count as well"
    record = engine.records["session"]
    assert record.preemptions_swap == 1
    assert record.tokens.computed_tokens == len(PROMPT) + len(REST)
    engine.check_idle()


def test_a_session_that_holds_up_nobody_comes_back_before_its_step(clock: SteppedClock) -> None:
    engine = swapped(_PLAIN, clock)
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert engine.outputs[0].num_scheduled_tokens == {"session": 1 + len(REST)}
    assert sync_copies(engine) == BLOCKS
    assert not engine.scheduler.swaps.counters.blocks_back_async


@pytest.mark.parametrize("takes_s", [0.005, 0.5])
def test_before_any_copy_was_timed_what_swapping_costs_says_what_a_session_takes(
    takes_s: float, clock: SteppedClock
) -> None:
    engine = SimulatedEngine(replace(_PLAIN, admission="none"))
    preempted_by_swap(engine, "session", PROMPT)
    step = engine.runner.step

    def take(output: Any) -> Any:
        clock.advance(_STEP_S)
        return step(output)

    # The runner takes no time of its own.
    engine.runner.step = take  # type: ignore[method-assign]
    decodes(engine, clock)
    curve = LatencyCurve({len(PROMPT): (takes_s * 1000,)})
    engine.scheduler.cost_model = CostModel(curve, curve, curve)
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    is_async = takes_s > _STEP_S
    assert ("session" in engine.outputs[0].num_scheduled_tokens) is not is_async
    engine.drain()
    assert engine.answers["session"] == expected_tokens([*PROMPT, *REST], 1)
    assert engine.scheduler.swaps.counters.blocks_back_async == BLOCKS * is_async


def test_what_a_copy_that_fails_does_not_bring_back_is_computed(
    engine: SimulatedEngine, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every copy in the background fails.
    monkeypatch.setattr(kv_checking_runner, "_FAILS_EVERY", 1)
    engine.scheduler.close_input("session", REST)
    until(engine, lambda: status(engine, "session") is LOADING)
    until(engine, lambda: not engine.scheduler.is_loading("session"))
    assert engine.scheduler.session_ledger("session").tokens.ready_tokens == 0
    engine.drain()
    assert sum(scheduled(engine, "session")) == len(PROMPT) + len(REST)
    assert engine.answers["session"] == expected_tokens([*PROMPT, *REST], 1)
    engine.check_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_who_gives_up_while_it_comes_back_leaves_nothing(
    engine: SimulatedEngine, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    if fails:
        # Every copy in the background.
        monkeypatch.setattr(kv_checking_runner, "_FAILS_EVERY", 1)
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    engine.abort("session")
    engine.check_invariants()
    engine.drain()
    assert "session" not in engine.answers
    engine.check_idle()


def test_input_waits_until_the_session_is_back(engine: SimulatedEngine, clock: SteppedClock) -> None:
    kept = 3 * BLOCK_SIZE + 5
    engine.scheduler.extend_prompt("session", [1])
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    engine.scheduler.replace_prompt("session", [*PROMPT[:kept], 249])
    engine.scheduler.close_input("session", [2])
    engine.drain()
    assert engine.answers["session"] == expected_tokens([*PROMPT[:kept], 249, 2], 1)
    tokens = engine.records["session"].tokens
    assert tokens.invalidated_tokens == len(PROMPT) - 1 - kept // BLOCK_SIZE * BLOCK_SIZE
    engine.check_idle()


def test_blocks_that_the_device_has_still_are_not_copied_back(clock: SteppedClock) -> None:
    engine = swapped(_PLAIN, clock)
    there = 20 * BLOCK_SIZE
    engine.add("holds", [*PROMPT[:there], 249], max_tokens=60)
    for _ in range(4):
        turn(engine, clock)
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    assert engine.scheduler.swaps.free_slots == engine.world.host_slots - (BLOCKS - 20)
    engine.drain()
    assert engine.answers["session"] == expected_tokens([*PROMPT, *REST], 1)
    assert engine.scheduler.swaps.counters.blocks_back_async == BLOCKS - 20


def test_others_take_none_of_its_slots_while_it_comes_back(clock: SteppedClock) -> None:
    engine = swapped(replace(_PLAIN, host_slots=BLOCKS + 30), clock)
    decodes(engine, clock)
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    swaps = engine.scheduler.swaps
    assert not swaps.swap_out("another", list(range(1, 32)), 31 * BLOCK_SIZE)
    assert swaps.swap_out("another", list(range(1, 31)), 30 * BLOCK_SIZE)
    swaps.drop("another")
    swaps.take_copies()
    engine.drain()
    assert engine.answers["session"] == expected_tokens([*PROMPT, *REST], 1)


def test_a_prompt_that_begins_alike_waits_for_the_session_and_shares_its_blocks(
    engine: SimulatedEngine, clock: SteppedClock
) -> None:
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    engine.add("alike", [*PROMPT, 249])
    engine.drain()
    assert sum(scheduled(engine, "alike")) == len(PROMPT) + 1 - (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.answers["alike"] == expected_tokens([*PROMPT, 249], 1)
    assert engine.answers["session"] == expected_tokens([*PROMPT, *REST], 1)
    engine.check_idle()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", ["streaming", "both"])
def test_who_is_back_computes_before_it_gives_its_blocks_up_again(
    world: str, policy: str, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that go first come all the time and need its blocks, also when it has just landed."""
    # Longer than a prompt takes.
    monkeypatch.setattr(kv_checking_runner, "_BACKGROUND_STEPS", (8,))
    small = replace(WORLDS[world], policy=policy, blocks=61, token_budget=256, admission="none")
    engine = SimulatedEngine(small)
    preempted_by_swap(engine, "session", PROMPT[:400], priority=1)
    engine.add("decodes", numbered(7, 20), max_tokens=200)
    engine.scheduler.close_input("session", REST)
    for index in range(100):
        if index % 10 == 0:
            engine.add(f"first {index}", numbered(11 + index, 45 * BLOCK_SIZE))
        turn(engine, clock)
    assert engine.answers["session"] == expected_tokens([*PROMPT[:400], *REST], 1)
    engine.drain()
    engine.check_idle()


def test_a_session_with_an_adapter_comes_back_before_its_step(clock: SteppedClock) -> None:
    """It might wait for its adapter's place when it is back, and its blocks with it."""
    engine = swapped(replace(_PLAIN, adapters=2), clock, lora_request=adapter(1))
    decodes(engine, clock)
    engine.scheduler.close_input("session", REST)
    turn(engine, clock)
    assert engine.outputs[0].num_scheduled_tokens["session"] == 1 + len(REST)
    assert sync_copies(engine) == BLOCKS


def test_what_was_said_of_a_swap_is_forgotten_with_it(clock: SteppedClock) -> None:
    engine = swapped(_PLAIN, clock)
    tier = engine.scheduler.connector.host_tier
    assert tier.resumes_async("session", BLOCKS) is False
    # Nobody in public knows what it has said.
    said = tier._resumes
    said["session"] = True
    engine.scheduler.replace_prompt("session", numbered(9, 30))
    engine.drain()
    assert not said
