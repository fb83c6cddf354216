"""Input and aborts of sessions in every state: what they answer is what a fresh request answers."""

from collections.abc import Callable

import pytest

from prefill_worker.streaming_request import LOADING, PARKED
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.integration.streaming_scheduler.sessions import (
    EVERY_PROTOCOL,
    MakeEngine,
    held_blocks,
    loading,
    parked,
    preempted_by_recompute,
    preempted_by_swap,
    request,
    running,
    session_tokens,
    text,
    until,
    waiting,
)

pytestmark = pytest.mark.integration


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
    assert session_tokens(engine, "s").prompt_tokens == 20


@pytest.mark.parametrize("kept", [0, 20, 150])
def test_appends_before_and_after_an_update_while_a_load_is_under_way_are_each_taken_in_once(
    make_engine: MakeEngine, kept: int
) -> None:
    engine = make_engine()
    loading(engine, "s", text("old", 150))
    for number in range(5):
        engine.scheduler.extend_prompt("s", [number])
    # The appends that follow may go on as the prompt of before did.
    changed = text("old", kept)
    engine.scheduler.replace_prompt("s", changed)
    for token in text("old", 170)[kept:]:
        engine.scheduler.extend_prompt("s", [token])
    assert engine.scheduler.close_input("s", [7]) == [*text("old", 170), 7]
    engine.drain()
    assert engine.answers["s"] == expected_tokens([*text("old", 170), 7], 1)
    assert engine.records["s"].tokens.inputs == 5 + 1 + 170 - kept


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
