"""Which session a step computes first under each policy, at a budget that is enough for one."""

from typing import Any

import pytest

from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SteppedClock
from tests.integration.streaming_scheduler.sessions import MakeEngine, held_blocks, park, scheduled_next, text, until

pytestmark = pytest.mark.integration


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


def test_default_computes_the_short_first_until_the_long_has_waited_and_sessions_beside_nothing_whole(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    engine = make_engine(policy="default", token_budget=96, blocks=60)
    # As if its steps had been measured: a short one has a block.
    engine.scheduler._speed.tokens_per_s = 100.0
    # The first step of a session is bounded by the budget alone.
    park(engine, "session", text("session", 17))
    engine.scheduler.extend_prompt("session", text("more", 96))
    engine.turn()
    assert engine.outputs[-1].num_scheduled_tokens == {"session": BLOCK_SIZE}
    engine.add("long", text("long", 200))
    engine.add("short", text("short", 20))
    assert scheduled_next(engine) == ["short", "long"]
    clock.advance(10)
    engine.add("shorter", text("shorter", 10))
    assert scheduled_next(engine)[0] == "long"
    steps = [scheduled_next(engine) for _ in range(4)]
    assert steps[-1] == ["session"]
    assert all("session" not in step or step == ["session"] for step in steps)


def test_the_speed_of_the_engine_is_measured_by_its_steps(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(policy="default", token_budget=96, blocks=60)
    scheduler, update = engine.scheduler, engine.scheduler.update_from_output

    def slow_update(*arguments: Any) -> Any:
        clock.advance(2)
        return update(*arguments)

    scheduler.update_from_output = slow_update
    engine.open("session", text("session", 97))
    engine.turn()
    # The measured speed is visible only in who is preempted, which depends on much else.
    assert scheduler._speed.tokens_per_s == 96 / 2


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


@pytest.mark.parametrize("policy", ["default", "fcfs", "lcas"])
def test_best_effort_gets_what_a_step_has_left_and_loses_its_blocks_first(make_engine: MakeEngine, policy: str) -> None:
    engine = make_engine(policy=policy, token_budget=24, blocks=12)
    engine.add("batch", text("batch", 150), priority=1)
    assert scheduled_next(engine) == ["batch"]
    engine.open("session", text("session", 41))
    engine.add("whole", text("whole", 24))
    assert scheduled_next(engine) == ["whole"], "it came last, and nothing is left"
    assert scheduled_next(engine)[0] == "session", "a prompt that is not whole yet goes before the batch, too"
    held = held_blocks(engine, "batch")
    engine.add("large", text("large", 170))
    while "large" not in engine.answers:
        assert engine.turn()
    assert held and not held_blocks(engine, "batch"), "the others could not have been computed beside it"
    engine.abort("session")
    until(engine, lambda: "batch" in engine.answers)
