"""Sessions that do not fit: who gives up blocks, how they come back, and that nobody stops the others."""

import pytest

from prefill_worker.streaming_request import PARKED
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.integration.streaming_scheduler.sessions import (
    EVERY_PROTOCOL,
    MakeEngine,
    held_blocks,
    park,
    preempted_by_swap,
    request,
    scheduled_next,
    text,
    until,
)

pytestmark = pytest.mark.integration


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
