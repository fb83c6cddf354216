"""One scheduler that does both: sessions, prompts for others, pulled and whole requests beside each other."""

from itertools import combinations
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from decode_worker.batch_settings import BatchSettings
from decode_worker.step_bound import Limit
from prefill_worker import two_phase
from prefill_worker.planning import StepPlan, plan_step
from prefill_worker.streaming_request import PARKED
from shared_worker.engine_scheduler import SharedMixin, SharedScheduler
from tests.campaign.fuzz.kv_checking_runner import LOAD_STEPS, expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.integration.decode_scheduler.requests import status, text, until
from tests.integration.shared_scheduler.conftest import GREEDY, MakeEngine

pytestmark = pytest.mark.integration

EVERY_PROTOCOL = [(v2, depth) for v2 in (False, True) for depth in (1, 2)]
PULLS, HANDS_OFF = {"do_remote_prefill": True}, {"do_remote_decode": True}
TPOT_S, BOUND = 0.050, 37
LONG = 400


def decoding(engine: SimulatedEngine, name: str) -> None:
    """A request that has begun to answer."""
    engine.add(name, text(name, 1), LONG)
    until(engine, lambda: bool(engine.answers.get(name)))
    engine.outputs.clear()


def pulled(engine: SimulatedEngine, name: str, blocks: int = 10, max_tokens: int = 3) -> None:
    engine.remote_tokens[name] = blocks * BLOCK_SIZE
    engine.add(name, text(name, blocks), max_tokens, transfer=dict(PULLS))


def computed(engine: SimulatedEngine, name: str) -> int:
    return sum(output.num_scheduled_tokens.get(name, 0) for output in engine.outputs)


@pytest.mark.parametrize("policy", ["fcfs", "heuristic", "q_learning"])
@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_all_kinds_of_requests_are_answered_beside_each_other(
    make_engine: MakeEngine, v2: bool, depth: int, policy: str
) -> None:
    decode = BatchSettings(policy=policy, chunk_tokens=BLOCK_SIZE, guard=False)
    engine = make_engine(v2=v2, depth=depth, decode=decode, tpot_s=TPOT_S)
    engine.open("session", text("session", 5), 9)
    engine.add("whole", text("whole", 6), 9)
    engine.add("for another", text("for another", 7), 1, transfer=dict(HANDS_OFF))
    pulled(engine, "pulled", 8, 9)
    for _ in range(3):
        engine.turn()
    engine.scheduler.extend_prompt("session", text("more", 2))
    engine.turn()
    engine.scheduler.close_input("session", text("last", 1))
    engine.drain()

    prompt = [*text("session", 5), *text("more", 2), *text("last", 1)]
    assert engine.answers == {
        "session": expected_tokens(prompt, 9),
        "whole": expected_tokens(text("whole", 6), 9),
        "for another": expected_tokens(text("for another", 7), 1),
        "pulled": expected_tokens(text("pulled", 8), 9),
    }
    assert engine.runner.read_leases == {"for another": True}


@pytest.mark.parametrize(("v2", "depth"), [(False, 1), (True, 2)])
def test_a_session_is_computed_while_it_takes_input_though_others_decode(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, is_measured=True)
    decoding(engine, "decoder")
    engine.open("session", text("session", 5))
    until(engine, lambda: status(engine, "session") is PARKED, most_turns=60)

    assert computed(engine, "session") == 5 * BLOCK_SIZE - 1
    assert all(output.num_scheduled_tokens.get("decoder") == 1 for output in engine.outputs), "a decode waits"


@pytest.mark.parametrize(("v2", "depth"), [(False, 1), (True, 2)])
def test_beside_an_open_session_what_has_landed_is_computed_in_the_next_step(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, token_budget=64)
    engine.open("session", text("session", 2))
    engine.add("long", text("long", 60), 2)
    decoding(engine, "decoder")
    engine.add("longer", text("longer", 60), 2)
    engine.turn()
    pulled(engine, "pulled")
    until(engine, lambda: status(engine, "pulled") is RequestStatus.WAITING_FOR_REMOTE_KVS, most_turns=2)
    until(engine, lambda: "pulled" in engine.scheduler.finished_recving_kv_req_ids, LOAD_STEPS + 2 * depth)
    engine.outputs.clear()
    until(engine, lambda: bool(engine.outputs), most_turns=2)

    assert engine.outputs[0].num_scheduled_tokens["pulled"] == 1
    assert not engine.answers.get("longer")


@pytest.mark.parametrize(("priority", "yields"), [(0, True), (1, False)])
def test_a_session_of_best_effort_is_late_by_its_own_objective(
    make_engine: MakeEngine, priority: int, yields: bool
) -> None:
    engine = make_engine(tpot_s=TPOT_S, ttft_s=0.1, best_effort_ttft_s=60.0)
    engine.open("session", text("session", 2), priority=priority)
    decoding(engine, "decoder")
    until(engine, lambda: len(engine.answers["decoder"]) == 200)
    engine.scheduler.close_input("session", text("last", 20))
    until(engine, lambda: bool(engine.answers.get("session")))

    assert bool(engine.scheduler.chunks[Limit.TTFT]) is yields


def test_beside_an_open_session_the_chunk_is_bounded_as_well(make_engine: MakeEngine) -> None:
    engine = make_engine(tpot_s=TPOT_S)
    engine.open("session", text("session", 2))
    decoding(engine, "decoder")
    engine.add("long", text("long", 20), 2)
    engine.scheduler.close_input("session", text("last", 20))
    until(engine, lambda: bool(engine.answers.get("long")) and bool(engine.answers.get("session")))

    prompts = [
        sum(tokens for tokens in output.num_scheduled_tokens.values() if tokens > 1) for output in engine.outputs
    ]
    assert max(prompts) == BOUND
    assert not engine.scheduler.chunks[Limit.TTFT]


def test_a_session_is_computed_beside_decodes_whose_cached_prompt_was_replaced_by_another_one(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(tpot_s=TPOT_S, ttft_s=1000.0)
    engine.add("before", text("long", 20), 1)
    engine.drain()
    decoding(engine, "decoder")
    engine.open("session", text("long", 20))
    engine.scheduler.replace_prompt("session", text("other", 15))
    engine.scheduler.close_input("session", [])
    until(engine, lambda: bool(engine.answers.get("session")), most_turns=20)

    assert engine.answers["session"] == expected_tokens(text("other", 15), 1)


def test_a_prompt_is_computed_beside_decodes_however_many_sessions_wait_for_input_in_front_of_it(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(tpot_s=TPOT_S, ttft_s=1000.0)
    for number in range(64):
        engine.open(f"session {number}", [])
    decoding(engine, "decoder")
    engine.add("long", text("long", 20), 1)
    until(engine, lambda: bool(engine.answers.get("long")), most_turns=20)

    assert engine.scheduler.chunks[Limit.TPOT] >= 20 * BLOCK_SIZE // BOUND


def test_idle_sessions_leave_the_places_to_those_that_decode(make_engine: MakeEngine) -> None:
    engine = make_engine(places=4)
    for number in range(6):
        engine.open(f"session {number}", text(number, 2))
        until(engine, lambda number=number: status(engine, f"session {number}") is PARKED)  # type: ignore[misc]
    for number in range(4):
        pulled(engine, f"pulled {number}", 4, LONG)
    until(engine, lambda: len(engine.scheduler.running) == 4, most_turns=20)

    assert {each.request_id for each in engine.scheduler.running} == {f"pulled {number}" for number in range(4)}


def test_a_prompt_for_another_worker_does_not_wait_for_the_decode_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(decode=BatchSettings(policy="heuristic", chunk_tokens=BLOCK_SIZE, guard=False))
    shared = text("shared", 10)
    for number in range(5):
        engine.add(f"{number}", [*shared, *text(number, 1)], LONG)
    until(engine, lambda: len(engine.answers) == 5)
    engine.add("stranger", text("stranger", 10), LONG)
    engine.add("for another", text("for another", 10), 1, transfer=dict(HANDS_OFF))
    for _ in range(5):
        engine.turn()

    assert engine.answers["for another"] == expected_tokens(text("for another", 10), 1)
    assert status(engine, "stranger") is RequestStatus.WAITING
    assert engine.scheduler.decode_report().waiting["held"] == 1


def test_a_session_that_decodes_here_is_none_of_the_decode_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.open("session", text("session", 2), LONG)
    engine.scheduler.close_input("session", text("last", 1))
    engine.add("whole", text("whole", 2), LONG)
    until(engine, lambda: len(engine.answers) == 2)

    assert [member.request_id for member in engine.scheduler.batching.batch()] == ["whole"]


def test_a_pull_takes_nothing_of_a_step_that_two_phases_plan(make_engine: MakeEngine) -> None:
    engine = make_engine(decode=GREEDY, token_budget=64)
    engine.open("session", text("session", 2))
    until(engine, lambda: status(engine, "session") is PARKED)
    pulled(engine, "pulled", 60)
    engine.add("whole", text("whole", 4), 2)
    engine.turn()

    assert status(engine, "pulled") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert computed(engine, "whole") == 4 * BLOCK_SIZE


def test_no_two_mixins_have_a_name_in_common_that_is_not_vllms() -> None:
    ours = [kind for kind in SharedScheduler.__mro__ if not kind.__module__.startswith(("vllm", "builtins", "abc"))]
    mixins = [kind for kind in ours if not issubclass(kind, SharedMixin)]
    theirs = {name for kind in SharedScheduler.__mro__ if kind.__module__.startswith("vllm") for name in vars(kind)}
    for one, other in combinations(mixins, 2):
        if not issubclass(one, other):
            both = vars(one).keys() & vars(other).keys() - theirs
            assert not {name for name in both if not name.startswith("__")}, f"{one.__name__}, {other.__name__}"


def test_blocks_of_a_hit_are_made_room_for_also_behind_a_prompt_that_does_not_fit(make_engine: MakeEngine) -> None:
    """What is cached is free memory until somebody takes it up."""
    engine = make_engine(blocks=41, places=12, token_budget=32, policy="fcfs")
    engine.add("before", text("cached", 12), 1)
    engine.add("leased", [*text("leased", 15), 0], 1, transfer=dict(HANDS_OFF))
    until(engine, lambda: len(engine.answers) == 2)
    engine.open("session", text("session", 12))
    until(engine, lambda: status(engine, "session") is PARKED)
    assert engine.free_blocks() == 12 and not engine.runner.read_leases
    engine.outputs.clear()
    engine.add("does not fit", text("other", 26), 1)
    engine.add("hits", [*text("cached", 12), *text("more", 1)], 1)
    engine.turn()
    assert computed(engine, "hits") == BLOCK_SIZE
    engine.abort("session")
    engine.drain()
    assert engine.answers["hits"] == expected_tokens([*text("cached", 12), *text("more", 1)], 1)


def test_a_step_is_planned_a_few_times_however_many_hits_wait_behind_what_does_not_fit(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(blocks=241, places=40, token_budget=96, policy="fcfs")
    engine.add("before", text("cached", 12), 1)
    engine.add("leased", [*text("leased", 15), 0], 1, transfer=dict(HANDS_OFF))
    until(engine, lambda: len(engine.answers) == 2)
    engine.open("session", text("session", 1))
    until(engine, lambda: status(engine, "session") is PARKED)
    engine.add("does not fit", text("other", 226), 1)
    for number in range(15):
        engine.add(f"hits {number}", [*text("cached", 12), number], 1)
    plans: list[StepPlan] = []

    def counted(*args: Any, **kwargs: Any) -> StepPlan:
        plans.append(plan_step(*args, **kwargs))
        return plans[-1]

    # Work is counted.
    monkeypatch.setattr(two_phase, "plan_step", counted)
    engine.turn()
    assert len(plans[-1].grants) == 15
    assert len(plans) <= 8
    engine.abort("session")
    engine.drain()
