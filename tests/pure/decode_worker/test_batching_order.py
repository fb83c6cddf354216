"""The order in which requests join the batch: stops and refusals, due times, priorities, and arrival."""

import random

import pytest

from decode_worker import turns
from decode_worker.batch_members import Cause, Reason
from decode_worker.batching import Batching
from decode_worker.stop_policies import Action, BatchState, Decision
from tests.counting import lines_run
from tests.pure.decode_worker.batch_steps import BOUND_S, Batch, Threshold, admit


def test_a_stop_ends_the_plan_and_is_among_its_decisions() -> None:
    batch = Batch()
    batch.arrive("aa.1", "aa.2", "b")
    plan = batch.batching.plan(0.0, 4)
    assert plan.request_ids == ["aa.1", "aa.2"]
    states = [BatchState(1, 0, 0), BatchState(2, 2, 0)]
    assert plan.decisions(plan.request_ids) == [Decision(states[0], Action.ADD), Decision(states[1], Action.STOP)]
    # Who was refused formed no batch, and with it the stop did not either.
    assert plan.decisions(["aa.1"]) == []
    batch.batching.settle(plan, ["aa.1"], [], 0.0)
    assert [member.request_id for member in batch.batching.waiting()] == ["aa.2", "b"]


def test_a_refusal_gives_nobody_a_turn() -> None:
    batch = Batch()
    batch.arrive("aa.1", "aa.2", "b", "c")
    plan = batch.batching.plan(0.0, 4)
    batch.batching.settle(plan, [], [], 0.0)
    assert batch.batching.waiting_by_cause() == {**dict.fromkeys(Cause, 0), Cause.CAPACITY: 4}
    assert batch.names() == ["aa.1", "aa.2"]
    assert batch.batching.waiting_by_cause() == {**dict.fromkeys(Cause, 0), Cause.HELD: 2}


def test_an_overdue_stranger_is_a_guest_and_leaves_the_tip() -> None:
    batch = Batch(places=3)
    batch.arrive("aaaa.1", "aaaa.2", "aaaa.3", "aaaa.4")
    batch.arrive("zz", deadline_s=1.0)
    assert batch.names() == ["aaaa.1", "aaaa.2", "aaaa.3"]
    batch.end("aaaa.1")
    assert batch.step() == [("zz", Reason.OVERDUE)]
    assert batch.tip() == 4
    assert "zz" not in batch.batching.tree
    with pytest.raises(ValueError, match="zz"):
        batch.arrive("zz")
    # A preempted request from outside the cohort waits as all do.
    batch.running.remove("zz")
    batch.batching.preempted("zz", batch.now_s)
    assert batch.step() == [("zz", Reason.OVERDUE)]
    batch.end("zz")
    assert batch.names() == ["aaaa.4"]


def test_a_deadline_is_due_at_half() -> None:
    batch = Batch()
    batch.arrive("aa.1", "aa.2")
    batch.names()
    batch.arrive("b", deadline_s=batch.now_s + 3.0)
    began_s = batch.now_s
    while not (joined := batch.step()):
        pass
    assert joined == [("b", Reason.OVERDUE)]
    assert batch.now_s - Batch.STEP_S - began_s == 1.5


def test_urgent_requests_join_whatever_they_share() -> None:
    batch = Batch()
    batch.arrive("aaaa.1", "aaaa.2")
    batch.names()
    batch.arrive("aaaa.3")
    batch.arrive("z", priority=-1)
    assert batch.step() == [("z", Reason.PRIORITY), ("aaaa.3", Reason.POLICY)]


def test_prompts_shorter_than_a_chunk_are_served_in_order() -> None:
    batch = Batch(places=2)
    batch.arrive(*[f".{number}" for number in range(6)])
    admitted = []
    while batch.batching.waiting_requests:
        admitted += batch.names()
        batch.end(*batch.running)
    assert admitted == [f".{number}" for number in range(6)]


def test_preempted_requests_come_first_by_arrival() -> None:
    batch = Batch(places=3)
    batch.arrive("a", "b", "c", "d")
    assert batch.names(by_arrival=True) == ["a", "b", "c"]
    for name in ("c", "b"):
        batch.running.remove(name)
        batch.batching.preempted(name, batch.now_s)
    assert batch.names(by_arrival=True) == ["b", "c"]
    batch.end("a")
    assert batch.names(by_arrival=True) == ["d"]
    assert batch.batching.counters.admissions == {Reason.FCFS: 6}


def test_due_times_of_those_that_are_gone_are_forgotten() -> None:
    """Thousands of requests with deadlines far away come and go by arrival, where nobody asks who is overdue."""
    batch = Batch()
    for number in range(5000):
        batch.arrive(f"a.{number}", deadline_s=1e6)
        assert batch.names(by_arrival=True)
        batch.end(*batch.running)
    assert batch.batching.turns.due_times < 2 * turns.SLACK
    assert not batch.batching.turns.before_turn


def test_the_order_of_arrival_is_a_few_lines_for_each_that_waits_where_priorities_are_mixed() -> None:
    """Two hundred join, some of each priority wait."""

    def work(waiting: int) -> int:
        rng, batching = random.Random(0), Batching(Threshold(), BOUND_S)
        for number in range(waiting):
            batching.insert(str(number), [], 0.0, priority=rng.randrange(3))

        def join() -> None:
            plan = batching.plan(0.0, 200, by_arrival=True)
            assert {each.member.priority for each in plan.joining} == {0}
            assert len(plan.joining) == 200
            batching.settle(plan, plan.request_ids, [], 0.0)

        return lines_run(join)

    assert work(6000) - work(1000) <= 5 * 5000


def test_an_overdue_request_takes_the_place_that_a_more_urgent_one_does_not_get() -> None:
    batching = Batching(Threshold(0), BOUND_S)
    for name in ("leads", "peer"):
        batching.insert(name, (1, 2), 0.0)
    assert admit(batching, 0.0, 4) == ["leads", "peer"]
    batching.insert("stranger", (7, 8), 0.1, priority=1)
    batching.insert("urgent", (5, 6), 0.1)
    assert admit(batching, 0.1, 3) == []
    batching.gone("urgent")
    batching.insert("also urgent", (5, 6), 0.1 + BOUND_S)
    assert admit(batching, 0.1 + BOUND_S, 3) == ["stranger"]
