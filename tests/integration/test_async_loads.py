"""Loads from host memory that no step waits for.

Real schedulers without a model, on a clock that is moved by hand (`simulated`), whose runner carries out what copies in
the background are told to, some steps late.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.batch_settings import BatchSettings
from kv_transfer.host_memory.copy_worker import CopyReport
from kv_transfer.host_memory.swap_ledger import SwapCopies
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.tier_terms import Load, TierCounters
from prefill_worker.streaming_request import LOADING
from tests.campaign.fuzz import kv_checking_runner
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.test_streaming_fairness import numbered, turn
from tests.integration.test_streaming_host_hits import in_host_memory_only

pytestmark = pytest.mark.integration

PREFIX = numbered(1, 960)
COMPUTED = 10
PROBE = [*PREFIX, *numbered(3, COMPUTED)]
_PLAIN = World(blocks=401, host_slots=400, token_budget=1024, copy_s=0.02, eviction="lru", promotion=False)
_BATCHES = BatchSettings(chunk_tokens=BLOCK_SIZE)
WORLDS = {
    "streaming": _PLAIN,
    "streaming v2": replace(_PLAIN, v2=True),
    "two steps at once": replace(_PLAIN, v2=True, depth=2),
    "decode": replace(_PLAIN, decode=_BATCHES),
    "both": replace(_PLAIN, decode=_BATCHES, is_shared=True),
    "both, bounded": replace(_PLAIN, decode=_BATCHES, is_shared=True, tpot_s=0.05),
}


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


@pytest.fixture(params=WORLDS)
def engine(request: pytest.FixtureRequest, clock: SteppedClock) -> SimulatedEngine:
    engine = decoding(WORLDS[request.param], clock)
    assert engine.answers["decodes"]
    engine.outputs.clear()
    return engine


def decoding(world: World, clock: SteppedClock) -> SimulatedEngine:
    """In which one request decodes, and the probe's prefix lies in host memory only."""
    engine = SimulatedEngine(world)
    in_host_memory_only(engine, clock, PREFIX)
    engine.add("decodes", numbered(7, 40), max_tokens=60)
    for _ in range(4):
        turn(engine, clock)
    return engine


def scheduled(engine: SimulatedEngine, name: str) -> list[int]:
    return [output.num_scheduled_tokens.get(name, 0) for output in engine.outputs]


def copy_due_since_s(engine: SimulatedEngine) -> float | None:
    since_s: float | None = engine.scheduler.copying_since_s
    return since_s


def status(engine: SimulatedEngine, name: str) -> Any:
    return engine.scheduler.requests[name].status


def test_others_are_computed_while_a_prefix_is_loaded(engine: SimulatedEngine, clock: SteppedClock) -> None:
    assert copy_due_since_s(engine) is None
    engine.add("probe", PROBE, max_tokens=3)
    turn(engine, clock)
    assert status(engine, "probe") is LOADING
    assert copy_due_since_s(engine) == clock.now_s
    assert not engine.outputs[0].kv_connector_metadata.rachis_swap_copies.back
    engine.drain()

    first = next(step for step, tokens in enumerate(scheduled(engine, "probe")) if tokens)
    assert first > 1
    assert scheduled(engine, "decodes")[:first] == [1] * first
    assert scheduled(engine, "probe")[first] == COMPUTED
    assert engine.answers["probe"] == expected_tokens(PROBE, 3)
    assert engine.scheduler.tiers.counters.host_hit_tokens == len(PREFIX)
    assert copy_due_since_s(engine) is None
    engine.check_idle()


def test_a_load_that_holds_nobody_is_waited_for_by_its_step(clock: SteppedClock) -> None:
    engine = SimulatedEngine(WORLDS["streaming"])
    in_host_memory_only(engine, clock, PREFIX)
    engine.outputs.clear()
    engine.add("probe", PROBE)
    turn(engine, clock)
    assert engine.outputs[0].num_scheduled_tokens == {"probe": COMPUTED}
    assert len(engine.outputs[0].kv_connector_metadata.rachis_swap_copies.back) == len(PREFIX) // BLOCK_SIZE


def test_who_waits_behind_a_load_counts_as_who_runs(clock: SteppedClock) -> None:
    engine = SimulatedEngine(_PLAIN)
    in_host_memory_only(engine, clock, PREFIX)
    engine.outputs.clear()
    engine.add("probe", PROBE)
    engine.add("other", numbered(7, 40))
    turn(engine, clock)
    assert engine.outputs[0].num_scheduled_tokens == {"other": 40}


def test_a_step_that_has_waited_for_a_load_says_nothing_of_how_long_steps_take(clock: SteppedClock) -> None:
    engine = SimulatedEngine(_PLAIN)
    another = numbered(2, len(PREFIX))
    for prefix in (PREFIX, another):
        in_host_memory_only(engine, clock, prefix)
    step = engine.runner.step

    def take(output: Any) -> Any:
        clock.advance(100.0 if output.has_sync_kv_loads else 0.01)
        return step(output)

    # The runner takes no time of its own.
    engine.runner.step = take  # type: ignore[method-assign]
    engine.add("alone", PROBE, max_tokens=9)
    turn(engine, clock)
    assert status(engine, "alone") is not LOADING
    engine.add("probe", [*another, *numbered(3, COMPUTED)])
    turn(engine, clock)
    assert status(engine, "probe") is LOADING


def test_what_is_being_loaded_is_loaded_once(engine: SimulatedEngine, clock: SteppedClock) -> None:
    before = engine.scheduler.tiers.counters.copied_back
    prompts = {f"probe {index}": [*PREFIX, *numbered(3 + index, COMPUTED)] for index in range(3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.drain()
    assert engine.scheduler.tiers.counters.copied_back - before == len(PREFIX) // BLOCK_SIZE
    assert [sum(scheduled(engine, name)) for name in prompts] == [COMPUTED] * 3
    assert all(engine.answers[name] == expected_tokens(prompt, 1) for name, prompt in prompts.items())


def test_what_a_failed_load_did_not_bring_is_computed(
    engine: SimulatedEngine, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every copy in the background fails.
    monkeypatch.setattr(kv_checking_runner, "_FAILS_EVERY", 1)
    engine.add("probe", PROBE)
    engine.drain()
    assert sum(scheduled(engine, "probe")) == len(PROBE)
    assert engine.answers["probe"] == expected_tokens(PROBE, 1)
    assert not engine.scheduler.tiers.counters.host_hit_tokens
    engine.check_idle()


def test_of_a_failed_load_what_was_on_the_device_is_not_computed_again(
    clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimulatedEngine(WORLDS["streaming"])
    in_host_memory_only(engine, clock, PREFIX)
    there = 20 * BLOCK_SIZE
    engine.add("holds", [*PREFIX[:there], 249], max_tokens=60)
    for _ in range(4):
        turn(engine, clock)
    engine.outputs.clear()
    # Every copy in the background fails.
    monkeypatch.setattr(kv_checking_runner, "_FAILS_EVERY", 1)
    engine.add("probe", PROBE)
    turn(engine, clock)
    assert status(engine, "probe") is LOADING
    engine.drain()
    assert sum(scheduled(engine, "probe")) == len(PROBE) - there
    assert engine.answers["probe"] == expected_tokens(PROBE, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_who_gives_up_while_it_is_loaded_leaves_nothing(
    engine: SimulatedEngine, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    if fails:
        # Every copy in the background.
        monkeypatch.setattr(kv_checking_runner, "_FAILS_EVERY", 1)
    engine.add("probe", PROBE)
    turn(engine, clock)
    engine.abort("probe")
    engine.check_invariants()
    engine.add("next", PROBE)
    engine.drain()
    assert engine.answers["next"] == expected_tokens(PROBE, 1)
    assert "probe" not in engine.answers
    engine.check_idle()


@pytest.mark.parametrize("world", ["streaming", "two steps at once", "both", "both, bounded"])
def test_what_a_session_is_loaded_beside_steps_was_found_and_its_input_waits(world: str, clock: SteppedClock) -> None:
    engine = decoding(WORLDS[world], clock)
    engine.open("session", PREFIX)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    assert engine.scheduler.close_input("session", numbered(3, COMPUTED)) == PROBE
    engine.drain()
    assert engine.answers["session"] == expected_tokens(PROBE, 1)
    tokens = engine.records["session"].tokens
    # Of what was known when it was admitted one block at least is computed.
    found = (len(PREFIX) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (tokens.reused_tokens, tokens.computed_tokens) == (found, len(PROBE) - found)


def test_a_copy_is_due_since_the_one_before_it_has_ended_in_all_workers(clock: SteppedClock) -> None:
    """Copies queue one behind another, and the ranks of an engine report each for itself."""
    tiers: Any = SimpleNamespace(counters=TierCounters(), let_go=lambda slots, loaded: None)
    pool: Any = SimpleNamespace(free_blocks=lambda blocks: None)
    requests: Any = {name: SimpleNamespace(is_finished=lambda: False) for name in ("first", "second")}
    tier = HostTier(tiers, pool, requests, BLOCK_SIZE, budget=8, workers=2, goes_async=lambda blocks, again: True)
    for number, name in enumerate(requests):
        # An engine of two ranks takes two processes; `load` wants more of a request than is looked at here.
        tier._begin(Load(name, (name,), 0, (number,)), [], SwapCopies())
    began_s = clock.now_s
    clock.advance(9.0)
    tier.take_in(CopyReport(Counter({1: 1, 2: 1})))
    assert tier.copying_since_s == began_s, "the other rank is not done with the first"
    tier.take_in(CopyReport(Counter({1: 1})))
    assert tier.copying_since_s == began_s + 9.0
    clock.advance(9.0)
    tier.take_in(CopyReport(Counter({2: 1})))
    assert tier.copying_since_s is None


def test_who_waits_for_what_is_being_loaded_takes_nothing_of_a_step(clock: SteppedClock) -> None:
    world = replace(_PLAIN, token_budget=64)
    engine = SimulatedEngine(world)
    in_host_memory_only(engine, clock, PREFIX)
    # While there is a session, steps are planned.
    engine.open("idle", [])
    engine.add("decodes", numbered(7, 40), max_tokens=60)
    engine.add("long", numbered(11, 1600), priority=1)
    for _ in range(4):
        turn(engine, clock)
    engine.add("probe", PROBE)
    turn(engine, clock)
    assert status(engine, "probe") is LOADING
    engine.outputs.clear()
    engine.add("waits", [*PREFIX, *numbered(5, COMPUTED)])
    turn(engine, clock)
    assert engine.outputs[0].num_scheduled_tokens == {"decodes": 1, "long": world.token_budget - 1}


def test_what_an_update_cuts_off_while_it_is_loaded_is_no_hit(clock: SteppedClock) -> None:
    engine = decoding(_PLAIN, clock)
    before = replace(engine.scheduler.tiers.counters)
    engine.open("session", PREFIX)
    turn(engine, clock)
    assert status(engine, "session") is LOADING
    kept = 3 * BLOCK_SIZE
    engine.scheduler.replace_prompt("session", PREFIX[: kept + 4])
    engine.scheduler.close_input("session", [1])
    engine.drain()
    assert engine.answers["session"] == expected_tokens([*PREFIX[: kept + 4], 1], 1)
    counters = engine.scheduler.tiers.counters
    assert counters.prompt_tokens - before.prompt_tokens == kept + 5
    assert counters.host_hit_tokens - before.host_hit_tokens == kept
    assert counters.device_hit_tokens == before.device_hit_tokens


def test_a_prompt_waits_for_the_beginning_of_its_prefix_that_is_being_promoted(clock: SteppedClock) -> None:
    engine = SimulatedEngine(replace(_PLAIN, eviction="lfu", promotion=True))
    for index in range(3):
        engine.add(f"warm {index}", [*PREFIX, index])
        engine.drain()
    # They hold nearly all blocks at once, so that the hot prefix leaves the device; then they are colder.
    for index in range(3):
        engine.add(f"flood {index}", numbered(20 + index, 130 * BLOCK_SIZE), max_tokens=20)
    engine.drain()
    engine.outputs.clear()
    engine.add("decodes", numbered(7, 40), max_tokens=60)
    for _ in range(10):
        turn(engine, clock)
        if any(each.copies.back for each in engine.outputs[-1].kv_connector_metadata.rachis_background_copies):
            break
    else:
        raise AssertionError("nothing is promoted")
    engine.add("probe", PROBE)
    engine.drain()
    assert engine.answers["probe"] == expected_tokens(PROBE, 1)
    assert sum(scheduled(engine, "probe")) == COMPUTED


def test_a_prompt_that_is_planned_is_loaded_beside_what_vllm_keeps_for_others(clock: SteppedClock) -> None:
    engine = SimulatedEngine(replace(_PLAIN, blocks=101, token_budget=64))
    prefix = numbered(1, 30 * BLOCK_SIZE)
    in_host_memory_only(engine, clock, prefix)
    engine.add("decodes", numbered(77, 40), max_tokens=900)
    # In the midst of it vLLM keeps free blocks for its rest, which the one that comes first by its priority needs.
    engine.add("long", numbered(99, 69 * BLOCK_SIZE - 4), priority=1)
    for _ in range(12):
        turn(engine, clock)
    engine.add("probe", [*prefix, *numbered(3, 5)])
    for _ in range(12):
        turn(engine, clock)
    assert engine.answers["probe"] == expected_tokens([*prefix, *numbered(3, 5)], 1)
    assert engine.scheduler.tiers.counters.copied_back_async == len(prefix) // BLOCK_SIZE
