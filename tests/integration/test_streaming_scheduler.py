"""The streaming scheduler by name: what it does in each state, on a model runner that checks the KV.

Real schedulers without a model (`simulated`), a clock that stands still. After every test all blocks and
host slots come back.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cluster_core.engine_jobs import SessionEventKind
from kv_transfer import vllm_private
from prefill_worker.streaming_request import LOADING, PARKED
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.session_moves import VOCABULARY, Client
from tests.campaign.fuzz.simulated import BLOCK_SIZE, SimulatedEngine, SteppedClock, World

pytestmark = pytest.mark.integration

EVERY_PROTOCOL = [(v2, depth) for v2 in (False, True) for depth in (1, 2)]
MakeEngine = Callable[..., SimulatedEngine]


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


@pytest.fixture
def make_engine(clock: SteppedClock) -> Iterator[MakeEngine]:
    """Engines of worlds with these fields. What is left when the test ends is aborted, and nothing may be lost."""
    made: list[SimulatedEngine] = []

    def make(**fields: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(World(**fields)))
        return made[-1]

    yield make
    for engine in made:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.drain()
        engine.check_idle()


def text(key: object, count: int) -> list[int]:
    """The same tokens for the same key; a longer text begins with the shorter one."""
    rng = random.Random(str(key))
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def request(engine: SimulatedEngine, name: str) -> Any:
    return engine.scheduler.requests[name]


def tokens_told(engine: SimulatedEngine, name: str) -> Any:
    return engine.scheduler.session_ledger(name).tokens


def held_blocks(engine: SimulatedEngine, name: str) -> list[int]:
    return [block.block_id for block in vllm_private.request_blocks(engine.scheduler, name)]


def until(engine: SimulatedEngine, condition: Callable[[], bool], most_turns: int = 200) -> None:
    for _ in range(most_turns):
        if condition():
            return
        engine.turn()
        engine.check_invariants()
    raise AssertionError("it does not come to that")


def park(engine: SimulatedEngine, name: str, prompt: list[int], max_tokens: int = 1) -> None:
    """Opens a session and computes all of it but the token that is held back."""
    engine.open(name, prompt, max_tokens)
    until(engine, lambda: request(engine, name).status is PARKED)


def scheduled_next(engine: SimulatedEngine) -> list[str]:
    """Whose tokens the next step computes, first of all first."""
    engine.turn()
    return list(engine.outputs[-1].num_scheduled_tokens)


# vLLM's own behaviour while no session is open.


def told(output: Any, names_of_blocks: dict[int, int]) -> tuple[Any, ...]:
    """Everything of a scheduler output that a model runner acts on, blocks by the names given."""

    def named(groups: Any) -> Any:
        return None if groups is None else [[names_of_blocks[block] for block in group] for group in groups]

    cached = output.scheduled_cached_reqs
    return (
        [
            (new.req_id, new.prompt_token_ids, new.prefill_token_ids, named(new.block_ids), new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ],
        cached.req_ids,
        cached.resumed_req_ids,
        {name: list(tokens) for name, tokens in cached.all_token_ids.items()},
        [named(blocks) for blocks in cached.new_block_ids],
        (cached.num_computed_tokens, cached.num_output_tokens),
        list(output.num_scheduled_tokens.items()),
        output.preempted_req_ids,
        output.finished_req_ids,
    )


def names_by_free_order(engine: SimulatedEngine) -> dict[int, int]:
    """A pool's blocks in the order in which it will give them away; of an idle engine those are all."""
    free = vllm_private.pool_of(engine.scheduler).free_block_queue.get_all_free_blocks()
    return {block.block_id: index for index, block in enumerate(free)}


def play_the_same(engines: tuple[SimulatedEngine, SimulatedEngine], seed: int) -> int:
    """Drives both with one stream of plain requests and aborts, comparing every step. How many were preempted."""
    rng, world = random.Random(seed), engines[0].world
    client = Client(rng, longest=(world.blocks - 1) * BLOCK_SIZE - 40)
    names = [names_by_free_order(engine) for engine in engines]
    expected: dict[str, list[int]] = {}
    unfinished: list[str] = []
    preempted = 0
    for turn in range(3000):
        if turn < 300 and rng.random() < 0.25:
            name, prompt, max_tokens = f"r{turn}", client.prompt(), rng.choice((1, 2, 30))
            expected[name] = expected_tokens(prompt, max_tokens)
            unfinished.append(name)
            for engine in engines:
                engine.add(name, prompt, max_tokens)
        if turn >= 300 and not any(engine.scheduler.has_requests() for engine in engines):
            break
        if unfinished and rng.random() < 0.02:
            name = unfinished.pop(rng.randrange(len(unfinished)))
            expected.pop(name, None)
            for engine in engines:
                engine.abort(name)
        before = [len(engine.outputs) for engine in engines]
        turned = [engine.turn() for engine in engines]
        assert turned[0] == turned[1]
        steps = [engine.outputs[count:] for engine, count in zip(engines, before, strict=True)]
        assert [told(step, names[0]) for step in steps[0]] == [told(step, names[1]) for step in steps[1]]
        preempted += sum(len(step.preempted_req_ids or ()) for step in steps[0])
    assert not any(engine.scheduler.requests for engine in engines), "the traffic has not ended"
    assert engines[0].answers == engines[1].answers
    assert {name: engines[1].answers.get(name) for name in expected} == expected
    return preempted


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_without_sessions_every_step_is_that_of_the_stock_scheduler(v2: bool, depth: int) -> None:
    # With tiers other prefixes are found; who is scheduled for what is the matter here.
    world = World(v2=v2, depth=depth, blocks=24, places=4, policy="lcas", tiers=False)
    stock = AsyncScheduler if depth > 1 else Scheduler
    assert sum(play_the_same((SimulatedEngine(world, stock), SimulatedEngine(world)), seed) for seed in range(3)) > 0


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_after_the_last_session_every_step_is_that_of_the_stock_scheduler(v2: bool, depth: int) -> None:
    # With tiers other prefixes are found; who is scheduled for what is the matter here.
    world = World(v2=v2, depth=depth, blocks=24, places=4, policy="lcas", tiers=False)
    stock = SimulatedEngine(world, AsyncScheduler if depth > 1 else Scheduler)
    streaming = SimulatedEngine(world)
    serve_random_sessions(streaming, random.Random(depth))
    # Else the sessions' prompts would be found.
    assert streaming.scheduler.reset_prefix_cache()
    assert play_the_same((stock, streaming), seed=5) > 0


def serve_random_sessions(engine: SimulatedEngine, rng: random.Random) -> None:
    for index in range(12):
        prompt = text(index, rng.randrange(1, 200))
        engine.open(f"s{index}", prompt)
        engine.turn()
        engine.scheduler.replace_prompt(f"s{index}", prompt[: len(prompt) // 2] + text(-index, 40))
    for index in range(12):
        engine.turn()
        if index % 4:
            engine.scheduler.close_input(f"s{index}", text(index, 3))
        else:
            engine.abort(f"s{index}")
    engine.drain()
    engine.records.clear()
    engine.check_idle()
    engine.answers.clear()


# Sessions in every state.


def waiting(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    engine.open(name, prompt)
    assert request(engine, name).status is RequestStatus.WAITING


def running(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    engine.open(name, prompt)
    engine.turn()
    assert request(engine, name).status is RequestStatus.RUNNING


def parked(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    park(engine, name, prompt)


def preempted_by_swap(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    park(engine, name, prompt)
    take_blocks_of(engine, name, "swap")
    assert engine.is_swapped(name)


def preempted_by_recompute(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    park(engine, name, prompt)
    take_blocks_of(engine, name, "recompute")
    assert not engine.is_swapped(name)


def take_blocks_of(engine: SimulatedEngine, name: str, how: str) -> None:
    """A complete request needs nearly the whole pool."""
    engine.scheduler.preemption_strategy = how
    engine.add("hungry", text("hungry", (engine.world.blocks - 2) * BLOCK_SIZE))
    until(engine, lambda: not held_blocks(engine, name))
    until(engine, lambda: "hungry" in engine.answers)


def loading(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    engine.remote_tokens[name] = len(prompt) // 2
    engine.open(name, prompt)
    engine.turn()
    assert request(engine, name).status is LOADING


STATES = [waiting, running, parked, preempted_by_swap, preempted_by_recompute, loading]


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("kept", [0, 50, 64, 150], ids="kept{}".format)
def test_update_in_any_state_answers_as_a_fresh_request(
    make_engine: MakeEngine, reach: Callable[..., None], kept: int, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, blocks=20, token_budget=48)
    reach(engine, "s", text("old", 150))
    changed = text("old", 150)[:kept] + text("new", 30)
    engine.scheduler.replace_prompt("s", changed)
    engine.scheduler.close_input("s", [7])
    engine.drain()
    assert engine.answers["s"] == expected_tokens([*changed, 7], 1)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("reach", STATES)
def test_input_of_every_kind_while_in_a_state_is_taken_in_order(
    make_engine: MakeEngine, reach: Callable[..., None], v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, blocks=20, token_budget=48)
    reach(engine, "s", text("old", 150))
    engine.scheduler.extend_prompt("s", text("more", 20))
    engine.scheduler.replace_prompt("s", text("old", 100))
    engine.scheduler.extend_prompt("s", text("last", 10))
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("old", 100) + text("last", 10), 1)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("reach", STATES)
def test_abort_in_any_state_frees_blocks_and_host_slots(
    make_engine: MakeEngine, reach: Callable[..., None], v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, blocks=20, token_budget=48)
    reach(engine, "s", text("old", 150))
    engine.abort("s")
    assert engine.scheduler.swaps.free_slots == engine.world.host_slots
    engine.drain()
    engine.records.clear()
    engine.check_idle()
    assert "s" not in engine.answers


def test_input_waits_until_a_load_has_landed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    loading(engine, "s", text("old", 150))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("old", 20))
    assert held_blocks(engine, "s") == blocks
    until(engine, lambda: request(engine, "s").status is PARKED)
    kept, fresh = held_blocks(engine, "s")
    assert kept == blocks[0]
    assert fresh != blocks[1], "the second block was published when the load had landed: it is not written again"
    assert tokens_told(engine, "s").prompt_tokens == 20


def test_a_session_that_was_preempted_updated_and_loaded_comes_as_new(make_engine: MakeEngine) -> None:
    """The model runner of V1 keeps what it knew of a preempted request; that is the prompt before the update."""
    engine = make_engine(blocks=20)
    preempted_by_recompute(engine, "s", text("old", 200))
    engine.remote_tokens["s"] = 60
    engine.scheduler.replace_prompt("s", text("new", 90))
    engine.scheduler.close_input("s", [1])
    until(engine, lambda: request(engine, "s").status is LOADING)
    engine.drain()
    assert engine.answers["s"] == expected_tokens([*text("new", 90), 1], 1)


# What an update keeps and frees.


def test_update_to_the_same_text_invalidates_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("a", 150))
    assert request(engine, "s").status is PARKED
    assert held_blocks(engine, "s") == blocks
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.records["s"].tokens.invalidated_tokens == 0
    assert engine.records["s"].tokens.computed_tokens == 150
    assert engine.answers["s"] == expected_tokens(text("a", 150), 1)


def test_empty_update_frees_everything_and_the_session_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    engine.scheduler.replace_prompt("s", [])
    assert request(engine, "s").status is PARKED
    assert held_blocks(engine, "s") == []
    assert engine.free_blocks() == engine.world.blocks - 1
    assert tokens_told(engine, "s").invalidated_tokens == 149
    engine.turn()
    engine.scheduler.extend_prompt("s", text("b", 30))
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("b", 30), 1)


def test_update_that_shortens_the_prompt_below_what_is_computed_keeps_whole_published_blocks(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("a", 50))
    # 49 tokens may be kept, and the block in which they end is published: 3 blocks of 16 are left.
    assert held_blocks(engine, "s") == blocks[:3]
    assert tokens_told(engine, "s").invalidated_tokens == 149 - 48
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 50), 1)


def test_update_in_a_block_that_nobody_else_reads_keeps_its_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 60))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("a", 55) + text("b", 20))
    assert held_blocks(engine, "s") == blocks
    assert tokens_told(engine, "s").invalidated_tokens == 4
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 55) + text("b", 20), 1)


def test_published_blocks_are_never_written(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    engine.scheduler.replace_prompt("s", text("a", 40) + text("b", 110))
    until(engine, lambda: request(engine, "s").status is PARKED)
    engine.add("other", text("a", 150))
    engine.drain()
    assert engine.answers["other"] == expected_tokens(text("a", 150), 1)
    (new,) = [new for output in engine.outputs for new in output.scheduled_new_reqs if new.req_id == "other"]
    assert new.num_computed_tokens == 144, "all that the session had published is found, and right"


def test_a_shared_prefix_is_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "first", text("a", 161))
    engine.open("second", text("a", 161))
    until(engine, lambda: request(engine, "second").status is PARKED)
    assert tokens_told(engine, "second").reused_tokens == 144
    assert tokens_told(engine, "second").computed_tokens == 16
    for name in ("first", "second"):
        engine.scheduler.close_input(name, [])
    engine.drain()
    assert engine.answers["first"] == engine.answers["second"] == expected_tokens(text("a", 161), 1)


# Small and odd input.


def test_append_of_nothing_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 50))
    blocks = held_blocks(engine, "s")
    engine.scheduler.extend_prompt("s", [])
    assert request(engine, "s").status is PARKED
    assert held_blocks(engine, "s") == blocks
    assert tokens_told(engine, "s").inputs == 1
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.records["s"].tokens.computed_tokens == 50


@pytest.mark.parametrize("every", [1, 7, 1000], ids="a step every {}".format)
@pytest.mark.parametrize("v2", [False, True])
def test_a_thousand_appends_of_one_token_compute_every_token_once(
    make_engine: MakeEngine, v2: bool, every: int
) -> None:
    engine = make_engine(v2=v2, blocks=80, token_budget=256)
    engine.open("s", [])
    for index, token in enumerate(text("a", 1000)):
        engine.scheduler.extend_prompt("s", [token])
        if index % every == 0:
            engine.turn()
    engine.scheduler.close_input("s", [])
    engine.drain()
    record = engine.records["s"]
    assert engine.answers["s"] == expected_tokens(text("a", 1000), 1)
    assert (record.tokens.inputs, record.tokens.computed_tokens, record.tokens.invalidated_tokens) == (1000, 1000, 0)
    assert len(record.events) <= 128


@pytest.mark.parametrize("prompt", [[], [3], text("a", 50)], ids=lambda prompt: f"{len(prompt)} tokens")
def test_finish_right_after_open(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    engine.open("s", prompt, 3)
    engine.scheduler.close_input("s", [9])
    engine.drain()
    assert engine.answers["s"] == expected_tokens([*prompt, 9], 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_finish_without_closing_text_computes_the_token_held_back(make_engine: MakeEngine, depth: int) -> None:
    engine = make_engine(depth=depth)
    park(engine, "s", text("a", 50), max_tokens=3)
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 50), 3)
    assert engine.records["s"].tokens.computed_tokens == 50 + (3 - 1)


def test_nothing_is_sampled_while_the_input_is_open(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 50))
    assert not any(engine.turn() for _ in range(3)), "there is nothing to do"
    assert engine.answers == {}
    assert not engine.scheduler.has_unfinished_requests()


# Preemption.


@pytest.mark.parametrize("how", ["swap", "recompute"])
@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_a_parked_session_gives_its_blocks_to_a_complete_request(
    make_engine: MakeEngine, how: str, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, blocks=16, preemption=how)
    park(engine, "s", text("a", 180))
    engine.add("complete", text("b", 200))
    until(engine, lambda: "complete" in engine.answers)
    ledger = engine.scheduler.session_ledger("s")
    assert (ledger.preemptions_swap, ledger.preemptions_recompute) == ((1, 0) if how == "swap" else (0, 1))
    engine.scheduler.close_input("s", text("c", 20))
    engine.drain()
    assert engine.answers["complete"] == expected_tokens(text("b", 200), 1)
    assert engine.answers["s"] == expected_tokens(text("a", 180) + text("c", 20), 1)


def test_a_swapped_session_that_is_updated_keeps_the_common_prefix_in_host_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(blocks=16)
    preempted_by_swap(engine, "s", text("a", 180))
    assert engine.scheduler.swaps.tokens("s") == 179
    assert engine.scheduler.swaps.used_slots == 12
    engine.scheduler.replace_prompt("s", text("a", 100) + text("b", 50))
    assert engine.scheduler.swaps.tokens("s") == 100
    assert engine.scheduler.swaps.used_slots == 7
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 100) + text("b", 50), 1)
    assert engine.scheduler.swaps.counters.blocks_back > 0
    assert engine.records["s"].tokens.invalidated_tokens == 79


def test_without_room_in_host_memory_a_session_is_recomputed(make_engine: MakeEngine) -> None:
    engine = make_engine(blocks=16, host_slots=11)
    park(engine, "s", text("a", 180))
    engine.add("complete", text("b", 200))
    until(engine, lambda: "complete" in engine.answers)
    ledger = engine.scheduler.session_ledger("s")
    assert (ledger.preemptions_swap, ledger.preemptions_recompute) == (0, 1)
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 180), 1)


def test_nobody_is_preempted_while_there_is_room(make_engine: MakeEngine) -> None:
    engine = make_engine(blocks=40)
    park(engine, "s", text("a", 180))
    engine.add("complete", text("b", 200))
    until(engine, lambda: "complete" in engine.answers)
    assert len(held_blocks(engine, "s")) == 12


def test_a_session_that_does_not_fit_does_not_stop_others(make_engine: MakeEngine) -> None:
    engine = make_engine(blocks=16, token_budget=200)
    engine.add("complete", text("b", 150))
    engine.open("too long beside it", text("a", 180))
    engine.open("short", text("c", 40))
    assert scheduled_next(engine) == ["complete", "short"]
    assert held_blocks(engine, "too long beside it") == []
    until(engine, lambda: request(engine, "too long beside it").status is PARKED)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("policy", ["default_vllm", "fcfs", "mcps", "lcas"])
def test_more_sessions_than_places_in_the_model_runner(
    make_engine: MakeEngine, policy: str, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, places=2, blocks=80, token_budget=64, policy=policy)
    prompts = {f"s{index}": text(index, 60 + index) for index in range(10)}
    for name, prompt in prompts.items():
        engine.open(name, prompt)
    until(engine, lambda: all(request(engine, name).status is PARKED for name in prompts))
    for name in prompts:
        engine.scheduler.close_input(name, [1])
    engine.drain()
    assert engine.answers == {name: expected_tokens([*prompt, 1], 1) for name, prompt in prompts.items()}
    assert max(len(output.num_scheduled_tokens) for output in engine.outputs) <= 2


# Policies, at a budget that is enough for one.


def test_fcfs_computes_complete_requests_first_and_then_by_arrival(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    engine = make_engine(policy="fcfs", token_budget=24)
    for name in ("early", "late"):
        engine.open(name, text(name, 49))
        clock.advance(1)
    engine.add("complete", text("complete", 24))
    assert [scheduled_next(engine)[0] for _ in range(3)] == ["complete", "early", "early"]
    assert scheduled_next(engine) == ["late"]


def test_default_vllm_goes_on_with_what_runs(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="default_vllm", token_budget=24)
    engine.open("running", text("running", 73))
    assert scheduled_next(engine) == ["running"]
    engine.add("complete", text("complete", 24))
    assert [scheduled_next(engine) for _ in range(3)] == [["running"], ["running"], ["complete"]]


def test_mcps_goes_on_with_whom_most_is_computed_of(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="mcps", token_budget=24, blocks=60)
    engine.open("first", [])
    park(engine, "most computed", text("b", 49))
    engine.scheduler.extend_prompt("first", text("a", 49))
    engine.scheduler.extend_prompt("most computed", text("c", 24))
    assert scheduled_next(engine) == ["most computed"]
    assert scheduled_next(engine) == ["first"]


def test_lcas_computes_the_latest_input_first(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(policy="lcas", token_budget=24, starvation_s=100)
    for name in ("a", "b", "c"):
        engine.open(name, text(name, 80))
    for name in ("c", "a", "b"):
        clock.advance(1)
        engine.scheduler.extend_prompt(name, [1])
    assert scheduled_next(engine) == ["b"]
    clock.advance(1)
    engine.scheduler.extend_prompt("a", [1])
    assert scheduled_next(engine) == ["a"]


def test_lcas_lets_one_that_has_waited_too_long_come_first(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(policy="lcas", token_budget=24, starvation_s=5, blocks=60)
    engine.open("rare", text("rare", 97))
    clock.advance(1)
    engine.open("often", text("often", 97))
    assert scheduled_next(engine) == ["often"]
    clock.advance(3)
    assert scheduled_next(engine) == ["often"]
    clock.advance(1)
    assert scheduled_next(engine) == ["rare"], "5 seconds after it came"
    engine.scheduler.extend_prompt("often", [1])
    assert [scheduled_next(engine) for _ in range(3)] == [["rare"]] * 3, "until it has caught up"
    assert scheduled_next(engine) == ["often"]


def test_lcas_under_overload_does_not_let_sessions_take_blocks_from_each_other_for_ever(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    """Each needs most of the pool, and longer than the bound on waiting: taking turns, none would ever be done."""
    engine = make_engine(policy="lcas", preemption="recompute", token_budget=24, blocks=16, starvation_s=0.02)
    prompts = {f"s{index}": text(index, 220) for index in range(4)}
    for name, prompt in prompts.items():
        engine.open(name, prompt)
        engine.scheduler.close_input(name, [1])
    for _ in range(200):
        clock.advance(0.01)
        engine.turn()
    assert engine.answers == {name: expected_tokens([*prompt, 1], 1) for name, prompt in prompts.items()}


def test_those_that_answer_already_give_up_their_places_to_nobody_and_finish(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    """They hold all places in the model runner, while others come before them."""
    engine = make_engine(policy="lcas", places=2, token_budget=48, blocks=60, starvation_s=1)
    for name in ("x", "y"):
        engine.add(name, text(name, 20), 5)
    engine.turn()
    engine.turn()
    for name in ("a", "b"):
        engine.open(name, text(name, 90))
        engine.scheduler.close_input(name, [1])
    clock.advance(2)
    engine.drain()
    assert engine.answers["x"] == expected_tokens(text("x", 20), 5)
    assert engine.answers["a"] == expected_tokens([*text("a", 90), 1], 1)


def test_loads_for_which_there_is_no_room_do_not_stop_those_that_hold_blocks(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    """A load takes all of its blocks at once and nobody is preempted for it: it comes after those that have some."""
    engine = make_engine(policy="fcfs", blocks=30, token_budget=24)
    for name in ("load", "another"):
        engine.open(name, [])
        clock.advance(1)
    engine.open("holds", text("holds", 300))
    until(engine, lambda: len(held_blocks(engine, "holds")) >= 10)
    for name in ("load", "another"):
        engine.remote_tokens[name] = 320
        engine.scheduler.close_input(name, text(name, 330))
    engine.scheduler.close_input("holds", [1])
    engine.drain()
    assert engine.answers["holds"] == expected_tokens([*text("holds", 300), 1], 1)
    assert engine.answers["load"] == expected_tokens(text("load", 330), 1)


# What is told of a session.


def test_the_record_counts_tokens_exactly(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=64)
    park(engine, "s", text("a", 100))
    engine.scheduler.extend_prompt("s", text("b", 50))
    until(engine, lambda: request(engine, "s").status is PARKED)
    progress = tokens_told(engine, "s")
    assert (progress.received_tokens, progress.computed_tokens, progress.ready_tokens) == (150, 149, 149)
    engine.scheduler.replace_prompt("s", text("a", 64) + text("c", 36))
    until(engine, lambda: request(engine, "s").status is PARKED)
    engine.scheduler.close_input("s", text("d", 10))
    engine.drain()
    counted = engine.records["s"].tokens
    assert counted.received_tokens == 100 + 50 + 100 + 10
    assert counted.computed_tokens == 99 + 50 + 35 + 11
    assert counted.invalidated_tokens == 149 - 64
    assert counted.reused_tokens == 64, "what the update left as it was"
    assert (counted.prompt_tokens, counted.ready_tokens, counted.inputs) == (110, 110, 2)


def test_what_the_prefix_cache_has_counts_as_reused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("before", text("a", 100))
    engine.drain()
    engine.open("s", text("a", 100))
    engine.scheduler.close_input("s", text("b", 10))
    engine.drain()
    counted = engine.records["s"].tokens
    assert (counted.reused_tokens, counted.computed_tokens) == (96, 14)


def test_events_come_in_the_order_of_what_happened(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(blocks=16)

    def later() -> bool:
        clock.advance(0.5)
        return True

    park(engine, "s", text("a", 180))
    later()
    engine.add("complete", text("b", 200))
    until(engine, lambda: later() and "complete" in engine.answers)
    engine.scheduler.replace_prompt("s", text("a", 100) + text("c", 20))
    until(engine, lambda: later() and request(engine, "s").status is PARKED)
    engine.scheduler.close_input("s", [1])
    engine.drain()
    events = engine.records["s"].events
    kind = SessionEventKind
    assert [event.kind for event in events] == [
        kind.QUEUED,
        kind.SCHEDULED,
        kind.KV_ON_DEVICE,
        kind.PREEMPTED_SWAP,
        kind.INVALIDATED,
        kind.QUEUED,
        kind.SCHEDULED,
        kind.RESUMED,
        kind.KV_ON_DEVICE,
        kind.QUEUED,
        kind.SCHEDULED,
        kind.FINISHED,
    ]
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert events[0].at_s == 0.0
    assert [event.tokens for event in events if event.kind is kind.PREEMPTED_SWAP] == [179]
    assert [event.tokens for event in events if event.kind is kind.INVALIDATED] == [79]


def test_the_record_of_an_aborted_session_is_not_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 50))
    engine.abort("s")
    engine.drain()
    assert engine.scheduler.take_session_record("s") is None
