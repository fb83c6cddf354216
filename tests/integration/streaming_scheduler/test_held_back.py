"""An open session that is not worth a step waits until it is, is overdue, or ends; hashes are of what is computed."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kv_transfer.between_steps import NAP_S
from prefill_worker.partial_budget import HELD_NAP_S
from prefill_worker.streaming_request import LOADING
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, KnownSpeed, SimulatedEngine, SteppedClock
from tests.integration.streaming_scheduler.sessions import MakeEngine, park, scheduled_next, text, until
from tests.integration.streaming_scheduler.sessions import request as request_of

pytestmark = pytest.mark.integration

STARVATION_S = 50.0


@pytest.fixture(params=[1, 2], ids=["one step", "two steps"])
def engine(request: pytest.FixtureRequest, make_engine: MakeEngine, clock: SteppedClock) -> SimulatedEngine:
    """Its sessions were replaced by the last update all of them, and many prompts came of late."""
    made = make_engine(policy="default", starvation_s=STARVATION_S, token_budget=200, blocks=80, depth=request.param)
    for index in range(20):
        park(made, f"replaced {index}", text(index, 100))
        made.scheduler.replace_prompt(f"replaced {index}", text(f"other {index}", 100))
        made.scheduler.close_input(f"replaced {index}", [])
        made.drain()
    for index in range(200):
        clock.advance(0.05)
        made.add(f"plain {index}", text(index, 10))
        made.drain()
    # Its steps take no time: as if they had been measured.
    made.scheduler._speed = KnownSpeed(2000.0)
    return made


def test_a_session_that_is_not_worth_a_step_is_held_back_and_computed_at_once_when_it_ends(
    engine: SimulatedEngine,
) -> None:
    engine.open("s", text("s", 100))
    assert [scheduled_next(engine) for _ in range(3)] == [[], [], []]
    assert engine.scheduler.held_nap_s == HELD_NAP_S
    engine.scheduler.close_input("s", [])
    assert scheduled_next(engine) == ["s"]
    assert not engine.scheduler.held_nap_s
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("s", 100), 1)


def test_one_that_is_held_back_is_computed_once_it_is_overdue(engine: SimulatedEngine, clock: SteppedClock) -> None:
    engine.open("s", text("s", 100))
    computed: list[str] = []
    for index in range(int(STARVATION_S) * 10 + 1):
        assert not computed, f"after {index} of {STARVATION_S * 10} tenths of a second"
        clock.advance(0.1)
        engine.add(f"other {index}", [1])
        assert scheduled_next(engine) == [f"other {index}"]
        computed = scheduled_next(engine)
    assert computed == ["s"]


def test_one_that_is_held_back_is_computed_when_fewer_prompts_come(
    engine: SimulatedEngine, clock: SteppedClock
) -> None:
    engine.open("s", text("s", 100))
    assert scheduled_next(engine) == []
    clock.advance(STARVATION_S - 1)
    assert scheduled_next(engine) == ["s"]


def test_whoever_is_computed_beside_it_is_not_held_back(engine: SimulatedEngine) -> None:
    engine.open("s", text("s", 100))
    engine.add("plain", text("plain", 300))
    assert [scheduled_next(engine) for _ in range(2)] == [["plain"], ["plain"]]
    assert not engine.scheduler.held_nap_s
    until(engine, lambda: "plain" in engine.answers)
    assert scheduled_next(engine) == []
    assert engine.scheduler.held_nap_s == HELD_NAP_S


def test_an_engine_whose_blocks_are_on_their_way_looks_more_often(engine: SimulatedEngine) -> None:
    """Nobody would hear that they have landed."""
    engine.open("s", text("s", 100))
    engine.remote_tokens["pulled"] = 96
    engine.add("pulled", text("pulled", 100))
    engine.turn()
    assert request_of(engine, "pulled").status is LOADING
    assert request_of(engine, "s").status is RequestStatus.WAITING
    assert not engine.scheduler.schedule().num_scheduled_tokens
    assert engine.scheduler.held_nap_s == NAP_S


@pytest.mark.parametrize("policy", ["default", "fcfs"])
def test_an_engine_in_which_a_whole_prompt_waits_for_copies_looks_more_often(
    make_engine: MakeEngine, policy: str
) -> None:
    """They hold blocks after the request that had them has ended, and nobody says that they are free."""
    engine = make_engine(policy=policy, token_budget=400, blocks=40, host_slots=80, admission="everything", copy_s=0.02)
    park(engine, "parked", text("parked", 30))
    engine.add("copied", text("copied", 36 * BLOCK_SIZE - 1))
    until(engine, lambda: "copied" in engine.answers)
    engine.scheduler.replace_prompt("parked", text("more", 40))
    engine.add("plain", text("plain", 36 * BLOCK_SIZE - 1))
    until(engine, lambda: not scheduled_next(engine) and engine.scheduler.copying_since_s is not None)
    assert engine.scheduler.held_nap_s == NAP_S
    until(engine, lambda: "plain" in engine.answers)


def test_what_a_step_brings_that_ran_beside_the_plan_is_looked_at_at_once(engine: SimulatedEngine) -> None:
    """The second of two steps has nothing of a prompt whose last tokens the first computes."""
    engine.open("s", text("s", 100))
    engine.add("plain", text("plain", 150))
    first = engine.scheduler.schedule()
    assert list(first.num_scheduled_tokens) == ["plain"]
    computed = engine.runner.step(first)
    if engine.world.depth > 1:
        second = engine.scheduler.schedule()
        assert not second.num_scheduled_tokens
        assert engine.scheduler.held_nap_s == NAP_S
    engine.scheduler.update_from_output(first, computed)
    assert not engine.scheduler.held_nap_s


def test_nobody_is_held_back_who_has_nothing_to_compute(engine: SimulatedEngine) -> None:
    park(engine, "s", [1])
    assert not engine.scheduler.schedule().num_scheduled_tokens
    assert not engine.scheduler.held_nap_s


def count_hashed(engine: SimulatedEngine, name: str) -> list[int]:
    """Of how many blocks hashes are made from now on, each time."""
    session = request_of(engine, name)
    # vLLM takes it with a new request alone.
    hasher, made = session._block_hasher, []

    def counted(of: Any) -> list[Any]:
        hashes: list[Any] = hasher(of)
        made.append(len(hashes))
        return hashes

    # Likewise.
    session._block_hasher = counted
    return made


def test_what_is_replaced_before_a_step_computes_it_gets_no_hashes(engine: SimulatedEngine) -> None:
    engine.open("s", text("s", 10))
    engine.add("plain", text("plain", 900))
    hashed = count_hashed(engine, "s")
    for index in range(5):
        engine.scheduler.replace_prompt("s", text(f"version {index}", 160))
        assert scheduled_next(engine) == ["plain"]
    assert not sum(hashed)
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert sum(hashed) == 160 // BLOCK_SIZE
    assert engine.answers["s"] == expected_tokens(text("version 4", 160), 1)


def test_a_step_that_computes_a_part_publishes_its_blocks_under_their_hashes(make_engine: MakeEngine) -> None:
    """What comes next finds them; the rest of the prompt has its hashes too."""
    engine = make_engine(policy="default", token_budget=48, blocks=60)
    engine.open("s", text("s", 10))
    engine.scheduler.replace_prompt("s", text("p", 160))
    hashed = count_hashed(engine, "s")
    assert scheduled_next(engine) == ["s"]
    assert sum(hashed) == 159 // BLOCK_SIZE
    engine.add("same", text("p", 90))
    engine.turn()
    assert engine.outputs[-1].num_scheduled_tokens == {"same": 90 - 48}
