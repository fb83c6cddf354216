"""Who must not wait for ever, and what must not be computed again and again, while sessions are open.

Real schedulers without a model, on a clock that is moved by hand (`simulated`). Each case was a defect once.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation

from control_plane.sessions.backlog import Backlog
from prefill_worker.policies import POLICIES
from prefill_worker.streaming_request import PARKED
from tests.campaign.fuzz.simulated_engine import SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World

pytestmark = pytest.mark.integration

TURN_S = 0.01


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


def turn(engine: SimulatedEngine, clock: SteppedClock) -> None:
    clock.advance(TURN_S)
    engine.turn()
    engine.check_invariants()


def computed_tokens(engine: SimulatedEngine) -> int:
    return sum(sum(output.num_scheduled_tokens.values()) for output in engine.outputs)


def numbered(first: int, count: int) -> list[int]:
    return [(first + 3 * index) % 250 for index in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_sessions_that_do_not_fit_together_do_not_take_blocks_from_each_other(
    policy: str, clock: SteppedClock
) -> None:
    world = World(policy=policy, preemption="recompute", blocks=31, host_slots=0, token_budget=96, places=6)
    engine = SimulatedEngine(world)
    backlog = Backlog(256, 32)
    backlog.attach(320)
    for name in ("first", "second"):
        engine.open(name, numbered(len(name), 320))
        for _ in range(20):
            turn(engine, clock)
    engine.outputs.clear()
    for _ in range(200):
        turn(engine, clock)
    told = engine.scheduler.session_ledger("second").tokens
    backlog.progressed(generation.SessionProgress(ready_tokens=told.ready_tokens))

    assert computed_tokens(engine) == 0
    assert not engine.scheduler.has_requests()
    assert backlog.has_room
    assert {engine.scheduler.requests[name].status for name in ("first", "second")} == {PARKED}


def test_a_session_that_lost_its_blocks_while_idle_takes_them_back_when_there_is_room(clock: SteppedClock) -> None:
    engine = SimulatedEngine(World(preemption="recompute", blocks=31, host_slots=0, token_budget=96, places=6))
    for name in ("first", "second"):
        engine.open(name, numbered(len(name), 320))
        for _ in range(20):
            turn(engine, clock)
    lost = next(name for name in ("first", "second") if not engine.scheduler.requests[name].num_computed_tokens)
    engine.abort("second" if lost == "first" else "first")
    for _ in range(20):
        turn(engine, clock)

    assert engine.scheduler.requests[lost].num_computed_tokens == 319


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_request_is_answered_beside_idle_sessions_that_fill_the_pool(policy: str, clock: SteppedClock) -> None:
    world = World(policy=policy, preemption="recompute", blocks=31, host_slots=0, token_budget=96, places=6)
    engine = SimulatedEngine(world)
    for name in ("first", "second"):
        engine.open(name, numbered(len(name), 320))
        for _ in range(20):
            turn(engine, clock)
    engine.add("plain", numbered(7, 190))
    for _ in range(20):
        turn(engine, clock)

    assert len(engine.answers["plain"]) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_request_is_not_kept_out_for_ever_by_small_ones_whose_blocks_are_leased(
    policy: str, clock: SteppedClock
) -> None:
    world = World(
        policy=policy,
        preemption="recompute",
        blocks=31,
        host_slots=0,
        token_budget=400,
        places=8,
        consumer=False,
        starvation_s=0.2,
    )
    engine = SimulatedEngine(world)
    scheduler, leases = engine.scheduler, []
    now = 0

    def lease(request: Any, blocks: Any) -> tuple[bool, None]:
        leases.append((now + 6, request))
        scheduler.swaps.drop(request.request_id)
        return True, None

    scheduler.connector.request_finished = lease
    engine.open("idle", [])
    for now in range(150):
        if now % 2 == 0:
            engine.add(f"small{now}", numbered(now, 60))
        if now == 20:
            engine.add("large", numbered(5, 400))
        clock.advance(TURN_S)
        engine.turn()
        for ended in [each for each in leases if each[0] <= now]:
            leases.remove(ended)
            # vLLM's method, as when the connector says that a lease has ended.
            scheduler._free_blocks(ended[1])

    assert len(engine.answers["large"]) == 1


def test_requests_that_share_a_prefix_run_together_while_a_session_is_open(clock: SteppedClock) -> None:
    engine = SimulatedEngine(World(preemption="recompute", blocks=31, host_slots=0, token_budget=96, places=6))
    shared = numbered(1, 320)
    engine.add("warm", shared)
    engine.drain()
    engine.open("idle", [])
    for index in range(4):
        engine.add(str(index), shared + [index] * 24, 20)
    most = 0
    for _ in range(40):
        turn(engine, clock)
        most = max(most, len(engine.scheduler.running))

    assert most == 4
    assert all(len(engine.answers[str(index)]) == 20 for index in range(4))


def test_a_request_whose_last_step_runs_is_not_planned_for_a_token_that_never_comes(clock: SteppedClock) -> None:
    engine = SimulatedEngine(
        World(depth=2, preemption="recompute", blocks=31, host_slots=0, token_budget=240, places=6)
    )
    engine.open("parked", numbered(1, 241))
    for _ in range(10):
        turn(engine, clock)
    engine.add("fits", numbered(2, 240))
    for _ in range(10):
        turn(engine, clock)

    assert len(engine.answers["fits"]) == 1
    assert engine.scheduler.session_ledger("parked").preemptions_recompute == 0


def test_a_session_counts_as_cached_only_what_it_had_not_computed_itself(clock: SteppedClock) -> None:
    engine = SimulatedEngine(World(preemption="recompute", blocks=61, host_slots=0, token_budget=96, places=6))
    engine.add("warm", numbered(1, 320))
    engine.drain()
    engine.open("found", numbered(1, 320))
    engine.open("new", numbered(2, 320))
    for _ in range(10):
        turn(engine, clock)
    scheduler = engine.scheduler
    assert scheduler.session_cached_tokens("found") == 304
    scheduler.replace_prompt("found", numbered(1, 40))
    assert scheduler.session_cached_tokens("found") == 39
    # The session is preempted in this step, though there is room.
    scheduler._preempt_left_out(scheduler.requests["new"], 0.0)
    scheduler.extend_prompt("new", [1, 2, 3])
    for _ in range(10):
        turn(engine, clock)

    assert scheduler.session_ledger("new").tokens.reused_tokens > 0
    assert scheduler.session_cached_tokens("new") == 0
