"""The decode scheduler by name: whom it admits when, on a model runner that checks the KV.

Real schedulers without a model (`simulated`), a clock that is set. After every test all blocks come back.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cluster_core.clock import monotonic_s
from decode_worker.batch_settings import BatchSettings
from kv_transfer import vllm_private
from kv_transfer.handoff.rules import DEADLINE_PARAM
from tests.campaign.fuzz.kv_checking_runner import LOAD_STEPS, expected_tokens
from tests.campaign.fuzz.session_moves import VOCABULARY
from tests.campaign.fuzz.simulated import BLOCK_SIZE, STEP_S, SimulatedEngine, SteppedClock, World
from tests.integration.test_streaming_scheduler import play_the_same
from worker_runtime.vllm_conversion import REQUEST_DEADLINE_ARG

pytestmark = pytest.mark.integration

EVERY_PROTOCOL = [(v2, depth) for v2 in (False, True) for depth in (1, 2)]
SETTINGS = BatchSettings(policy="heuristic", chunk_tokens=BLOCK_SIZE, guard=False)
GREEDY = replace(SETTINGS, policy="greedy")
LONG = 60
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
        its: dict[str, Any] = {"blocks": 200, "places": 8, "token_budget": 400, "sessions": 0, "decode": SETTINGS}
        engine = SimulatedEngine(World(**its | fields))
        engine.scheduler.recompute_kv_load_failures = True
        made.append(engine)
        carry_out = engine.runner.step

        def step(output: Any) -> Any:
            clock.advance(STEP_S)
            return carry_out(output)

        engine.runner.step = step  # type: ignore[method-assign]
        return engine

    yield make
    for engine in made:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.drain()
        engine.check_idle()
        if engine.scheduler.batching is not None:
            assert not engine.scheduler.batching._batch
            assert not list(engine.scheduler.batching.waiting())


def text(key: object, blocks: float) -> list[int]:
    """The same tokens for the same key."""
    rng = random.Random(str(key))
    return [rng.randrange(VOCABULARY) for _ in range(round(blocks * BLOCK_SIZE))]


def prompt(*parts: tuple[object, float]) -> list[int]:
    return [token for key, blocks in parts for token in text(key, blocks)]


def status(engine: SimulatedEngine, name: str) -> RequestStatus:
    its: RequestStatus = engine.scheduler.requests[name].status
    return its


def held_blocks(engine: SimulatedEngine, name: str) -> int:
    return len(vllm_private.request_blocks(engine.scheduler, name))


def until(engine: SimulatedEngine, condition: Callable[[], bool], most_turns: int = 400) -> None:
    for _ in range(most_turns):
        if condition():
            return
        engine.turn()
        engine.check_invariants()
    raise AssertionError("it does not come to that")


def begun(engine: SimulatedEngine) -> list[str]:
    """Whose computation has begun, in that order."""
    return [new.req_id for output in engine.outputs for new in output.scheduled_new_reqs]


def add_group(engine: SimulatedEngine, key: str, count: int, max_tokens: int = LONG) -> list[str]:
    """Requests that share ten blocks, and run."""
    names = [f"{key}{number}" for number in range(count)]
    for name in names:
        engine.add(name, prompt((key, 10), (name, 1.5)), max_tokens)
    until(engine, lambda: all(status(engine, name) is RequestStatus.RUNNING for name in names))
    return names


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_with_fcfs_every_step_is_that_of_the_stock_scheduler(v2: bool, depth: int) -> None:
    # With tiers other prefixes are found; who is scheduled for what is the matter here.
    world = World(v2=v2, depth=depth, blocks=24, places=4, tiers=False, decode=BatchSettings(policy="fcfs"))
    stock = AsyncScheduler if depth > 1 else Scheduler
    assert sum(play_the_same((SimulatedEngine(world, stock), SimulatedEngine(world)), seed) for seed in range(3)) > 0


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_who_shares_most_with_the_batch_is_admitted_first(make_engine: MakeEngine, v2: bool, depth: int) -> None:
    engine = make_engine(v2=v2, depth=depth, places=4, decode=GREEDY)
    add_group(engine, "a", 4)
    for name, parts in (
        ("stranger", (("b", 10),)),
        ("half", (("a", 5), ("half", 5))),
        ("peer", (("a", 10), ("peer", 1))),
        ("another", (("a", 10), ("another", 1))),
    ):
        engine.add(name, prompt(*parts), 2)
    for name in ("a1", "a2", "a3"):
        engine.abort(name)
    until(engine, lambda: len(begun(engine)) == 7)
    assert begun(engine)[4:] == ["peer", "another", "half"]
    engine.drain()
    assert begun(engine)[-1] == "stranger"
    for name, parts in (("peer", (("a", 10), ("peer", 1))), ("stranger", (("b", 10),))):
        assert engine.answers[name] == expected_tokens(prompt(*parts), 2)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_nothing_is_pulled_for_a_request_that_waits(
    make_engine: MakeEngine, clock: SteppedClock, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    add_group(engine, "a", 5, max_tokens=400)
    engine.remote_tokens["stranger"] = 9 * BLOCK_SIZE
    engine.add("stranger", text("b", 10), 3)
    engine.add("a9", prompt(("a", 10), ("a9", 1)), 400)
    for _ in range(20):
        engine.turn()
        engine.check_invariants()
        assert status(engine, "stranger") is RequestStatus.WAITING
        assert held_blocks(engine, "stranger") == 0
        assert engine.remote_tokens["stranger"] == 9 * BLOCK_SIZE
    assert status(engine, "a9") is RequestStatus.RUNNING
    assert engine.scheduler.decode_report().waiting == {"capacity": 0, "held": 1, "prefix": 0}
    clock.advance(SETTINGS.wait_bound_s)
    until(engine, lambda: status(engine, "stranger") is RequestStatus.WAITING_FOR_REMOTE_KVS)
    report = engine.scheduler.decode_report()
    assert (report.loading_requests, report.admissions["overdue"]) == (1, 1)
    assert SETTINGS.wait_bound_s <= report.longest_held_s < SETTINGS.wait_bound_s + 30 * STEP_S
    until(engine, lambda: len(engine.answers.get("stranger", ())) == 3)
    assert engine.answers["stranger"] == expected_tokens(text("b", 10), 3)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_peers_wait_for_a_pulled_prefix_and_share_its_blocks(make_engine: MakeEngine, v2: bool, depth: int) -> None:
    engine = make_engine(v2=v2, depth=depth)
    for name in ("first", "peer"):
        engine.remote_tokens[name] = 10 * BLOCK_SIZE
    engine.add("first", prompt(("a", 10), ("first", 1)), LONG)
    engine.turn()
    engine.add("peer", prompt(("a", 10), ("peer", 1)), LONG)
    engine.turn()
    assert status(engine, "peer") is RequestStatus.WAITING
    assert engine.scheduler.decode_report().waiting["prefix"] == 1
    until(engine, lambda: status(engine, "peer") is RequestStatus.RUNNING)
    assert engine.remote_tokens == {"peer": 10 * BLOCK_SIZE}, "the peer found it on the device"
    engine.drain()
    assert engine.answers["peer"] == expected_tokens(prompt(("a", 10), ("peer", 1)), LONG)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_a_request_cancelled_while_its_kv_is_pulled_frees_who_waits_for_it(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    engine.remote_tokens["first"] = 10 * BLOCK_SIZE
    engine.add("first", prompt(("a", 10), ("first", 1)), 2)
    engine.turn()
    assert status(engine, "first") is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.add("peer", prompt(("a", 10), ("peer", 1)), 2)
    engine.turn()
    engine.abort("first")
    assert engine.scheduler.decode_report().loading_requests == 0
    engine.drain()
    assert engine.answers == {"peer": expected_tokens(prompt(("a", 10), ("peer", 1)), 2)}


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("policy", ["greedy", "heuristic"])
def test_a_preempted_request_comes_again(make_engine: MakeEngine, policy: str, v2: bool, depth: int) -> None:
    engine = make_engine(v2=v2, depth=depth, blocks=24, places=4, decode=replace(SETTINGS, policy=policy))
    prompts = {name: prompt(("a", 3), (name, 2)) for name in "rstuv"}
    for name, its in prompts.items():
        engine.add(name, its, LONG)
    engine.drain()
    assert any(output.preempted_req_ids for output in engine.outputs)
    assert engine.answers == {name: expected_tokens(its, LONG) for name, its in prompts.items()}
    assert engine.scheduler.decode_report().admissions["overdue"] > 0, "who was preempted goes before others"


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
@pytest.mark.parametrize("landing_blocks", [0, 1, 4])
def test_what_a_failed_pull_leaves_out_is_computed(
    make_engine: MakeEngine, landing_blocks: int, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    add_group(engine, "a", 2, max_tokens=20)
    engine.remote_tokens["r"] = 9 * BLOCK_SIZE
    engine.scheduler.connector.failing["r"] = landing_blocks * BLOCK_SIZE
    engine.add("r", text("r", 10), 4)
    until(engine, lambda: status(engine, "r") is RequestStatus.WAITING_FOR_REMOTE_KVS)
    until(engine, lambda: len(engine.answers.get("r", ())) == 4, most_turns=10 * LOAD_STEPS)
    assert engine.answers["r"] == expected_tokens(text("r", 10), 4)
    assert engine.runner.failed_loads == 1


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_a_request_that_is_put_back_after_its_pull_failed_reserves_no_blocks(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth)
    scheduler = engine.scheduler
    add_group(engine, "a", 2)
    engine.remote_tokens["r"] = 9 * BLOCK_SIZE
    scheduler.connector.failing["r"] = 0
    engine.add("r", text("r", 10), 4)
    until(engine, lambda: status(engine, "r") is RequestStatus.WAITING_FOR_REMOTE_KVS)
    # After the failure the connector cannot tell for a while what it could load.
    scheduler.connector.undecided["r"] = 5
    until(engine, lambda: scheduler.batching.waits("r"))
    assert scheduler.requests["r"] not in scheduler._inflight_prefills
    until(engine, lambda: len(engine.answers.get("r", ())) == 4)
    assert engine.answers["r"] == expected_tokens(text("r", 10), 4)


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_requests_that_come_together_pull_what_they_share_once(make_engine: MakeEngine, v2: bool, depth: int) -> None:
    engine = make_engine(v2=v2, depth=depth, decode=GREEDY)
    for name in ("first", "peer", "peer too"):
        engine.remote_tokens[name] = 10 * BLOCK_SIZE
        request = engine.request(name, prompt(("a", 10), (name, 1)), 2)
        request.kv_transfer_params = {"do_remote_prefill": True, DEADLINE_PARAM: monotonic_s() + 30}
        engine.scheduler.add_request(request)
    engine.turn()
    pulled = [
        name for name in engine.scheduler.requests if status(engine, name) is RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    assert pulled == ["first"]
    engine.drain()
    assert set(engine.remote_tokens) == {"peer", "peer too"}, "they found it on the device"


def test_a_deadline_is_due_at_half_the_time_that_is_left(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(places=6)
    add_group(engine, "a", 5, max_tokens=400)
    before_s = clock.now_s
    by_client = engine.request("client", text("b", 10), 2)
    by_client.sampling_params.extra_args = {REQUEST_DEADLINE_ARG: before_s + 1.0}
    by_lease = engine.request("lease", text("c", 10), 2)
    by_lease.kv_transfer_params = {"do_remote_prefill": True, DEADLINE_PARAM: before_s + 2.0}
    engine.scheduler.add_request(by_client)
    engine.scheduler.add_request(by_lease)
    due_s = {member.request_id: member.due_s - before_s for member in engine.scheduler.batching.waiting()}
    assert due_s["client"] == pytest.approx(0.5)
    assert due_s["lease"] == pytest.approx(1.0)
    until(engine, lambda: "client" in begun(engine))
    assert 0.5 <= clock.now_s - before_s <= 0.5 + 3 * STEP_S


def test_priorities_go_before_shared_prefixes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    add_group(engine, "a", 5)
    engine.add("peer", prompt(("a", 10), ("peer", 1)), 2)
    engine.add("urgent", text("b", 10), 2, priority=-1)
    engine.turn()
    assert begun(engine)[-2:] == ["urgent", "peer"]
    assert engine.scheduler.decode_report().admissions["priority"] == 1


def test_the_policy_cannot_change_while_there_are_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("r", text("r", 2), 1)
    with pytest.raises(RuntimeError, match="has requests"):
        engine.scheduler.use_policy(GREEDY)
    assert engine.scheduler.decode_report().policy == "heuristic"
    engine.drain()
    assert engine.scheduler.decode_report().steps > 0
    for settings in (GREEDY, replace(SETTINGS, policy="fcfs"), SETTINGS):
        engine.scheduler.use_policy(settings)
        report = engine.scheduler.decode_report()
        assert (report.policy, report.steps, sum(report.admissions.values())) == (settings.policy, 0, 0)
        engine.add("r", text("r", 2), 3)
        engine.drain()
        assert engine.answers.pop("r")[-3:] == expected_tokens(text("r", 2), 3)


def test_the_report_tells_what_was_done(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(depth=1)
    names = add_group(engine, "a", 5, max_tokens=10)
    engine.add("held", prompt(("b", 10), ("held", 1)), 2)
    engine.add("behind", prompt(("a", 4), ("behind", 4)), 2)
    clock.advance(0.25)
    engine.turn()
    report = engine.scheduler.decode_report()
    assert (report.policy, report.mode) == ("heuristic", "policy")
    assert (report.running_requests, report.loading_requests) == (5, 0)
    assert report.waiting == {"capacity": 0, "held": 2, "prefix": 0}
    assert report.tip_tokens == 10 * BLOCK_SIZE
    assert report.working_set_tokens == (10 + 5) * BLOCK_SIZE
    assert report.admissions == {"idle": 1, "policy": 4}
    assert report.lost_tokens == 0
    assert report.steps == len([output for output in engine.outputs if output.total_num_scheduled_tokens])
    assert report.batch_sum == sum(len(output.num_scheduled_tokens) for output in engine.outputs)
    assert report.shared_tokens_sum == report.steps * 10 * BLOCK_SIZE
    assert report.decisions == 5
    detail = engine.scheduler.decode_batch(10)
    assert [(group.tokens, group.running, group.waiting) for group in detail.groups] == [(10 * BLOCK_SIZE, 5, 0)]
    assert len(detail.groups[0].hash) == 8
    assert [(each.request_id, each.cause) for each in detail.waiting] == [("held", "held"), ("behind", "held")]
    assert [each.shared_tokens for each in detail.waiting] == [0, 4 * BLOCK_SIZE]
    assert [each.prompt_tokens for each in detail.waiting] == [11 * BLOCK_SIZE, 8 * BLOCK_SIZE]
    assert detail.waiting[0].waited_s == pytest.approx(0.25 + STEP_S)
    assert [each.request_id for each in engine.scheduler.decode_batch(1).waiting] == ["held"]
    for name in names[1:]:
        engine.abort(name)
    engine.drain()
    report = engine.scheduler.decode_report()
    assert sum(report.admissions.values()) == 7
    assert report.waiting == {"capacity": 0, "held": 0, "prefix": 0}
    assert sum(report.wait_s.values()) >= 2 * 0.25
    assert (report.tip_tokens, report.working_set_tokens) == (0, 0)


def test_a_probe_admits_by_arrival(make_engine: MakeEngine) -> None:
    settings = replace(SETTINGS, guard=True, probe_interval_s=0.2, probe_s=0.1, fallback_s=0.5)
    engine = make_engine(places=2, decode=settings)
    for number in range(60):
        engine.add(f"r{number}", prompt((number % 3, 4), (number, 1)), 12)
    modes = set()
    while engine.turn():
        modes.add(engine.scheduler.decode_report().mode)
        engine.check_invariants()
    report = engine.scheduler.decode_report()
    assert {"policy", "probe"} <= modes
    assert min(report.probes, report.admissions["fcfs"], report.admissions["policy"]) > 0
    assert len(engine.answers) == 60


def teach(engine: SimulatedEngine, clock: SteppedClock) -> None:
    """Enough steps with strangers waiting for a learner to learn."""
    for number in range(12):
        engine.add(f"r{number}", prompt((number % 2, 6), (number, 1)), 40)
    until(engine, lambda: not engine.scheduler.requests, most_turns=3000)


@pytest.mark.parametrize("policy", ["bandit", "q_learning"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_learned_is_saved_at_shutdown_and_loaded_again(
    make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path, policy: str, depth: int
) -> None:
    settings = replace(SETTINGS, policy=policy, policy_folder=str(tmp_path))
    engine = make_engine(depth=depth, decode=settings)
    teach(engine, clock)
    learned = engine.scheduler.decode_batch(1).table
    assert learned
    engine.scheduler.shutdown()
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["policy"] == policy
    assert make_engine(depth=depth, decode=settings).scheduler.decode_batch(1).table == learned
    # For another chunk the same numbers would be of no use.
    other = make_engine(depth=depth, decode=replace(settings, chunk_tokens=4 * BLOCK_SIZE))
    assert other.scheduler.decode_batch(1).table == ()


def test_a_table_is_saved_now_and_then(make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path) -> None:
    engine = make_engine(decode=replace(SETTINGS, policy="bandit", policy_folder=str(tmp_path), save_interval_s=0.2))
    teach(engine, clock)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"format": 0}'])
def test_a_file_of_no_use_is_moved_aside_and_the_table_starts_empty(
    make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path, content: str
) -> None:
    settings = replace(SETTINGS, policy="bandit", policy_folder=str(tmp_path))
    first = make_engine(decode=settings)
    teach(first, clock)
    first.scheduler.shutdown()
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    engine = make_engine(decode=settings)
    assert engine.scheduler.decode_batch(1).table == ()
    (aside,) = tmp_path.iterdir()
    assert aside.name != file.name
    assert aside.read_text() == content
    teach(engine, clock)
    engine.scheduler.shutdown()
    assert file.exists()


def test_a_folder_that_cannot_be_written_stops_nothing(
    make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    engine = make_engine(decode=replace(SETTINGS, policy="bandit", policy_folder=str(in_the_way / "folder")))
    teach(engine, clock)
    engine.scheduler.shutdown()
    assert len(engine.answers) == 12
