"""Whom the decode scheduler admits when, and what it reports."""

from dataclasses import replace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from decode_worker.batch_settings import BatchSettings
from kv_transfer.handoff.rules import DEADLINE_PARAM
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, STEP_S, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.decode_scheduler.requests import (
    EVERY_PROTOCOL,
    GREEDY,
    LONG,
    SETTINGS,
    MakeEngine,
    add_group,
    begun,
    prompt,
    text,
    until,
)
from tests.integration.stock_steps import play_the_same
from worker_runtime.vllm_conversion import REQUEST_DEADLINE_ARG

pytestmark = pytest.mark.integration


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
    assert report.waiting == {"capacity": 0, "held": 2, "prefix": 0, "share": 0}
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
    assert report.waiting == {"capacity": 0, "held": 0, "prefix": 0, "share": 0}
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
