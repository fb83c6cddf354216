"""Requests that wait for a prefix on its way: for how long, and who runs meanwhile."""

from decode_worker.batch_members import Cause, Reason
from decode_worker.batching import Batching
from decode_worker.chunk_hashes import ChunkHash
from tests.pure.decode_worker.batch_steps import BOUND_S, Batch, Threshold, admit, hashes_of


def test_peers_wait_for_a_prefix_on_its_way_and_join_when_it_is_there() -> None:
    resident: set[ChunkHash] = set()
    batch = Batch(is_resident=lambda chunk: chunk in resident)
    batch.pulled = {"aa.1"}
    batch.arrive("aa.1")
    assert batch.names() == ["aa.1"]
    batch.arrive("aa.2", "aa.3")
    assert batch.names() == []
    assert batch.batching.waiting_by_cause()[Cause.PREFIX] == 1
    assert batch.names() == []
    assert batch.batching.loading_requests == 1
    batch.batching.loaded("aa.1")
    resident.update(hashes_of("aa"))
    assert batch.names() == ["aa.2", "aa.3"]
    # One stands for those behind it: the other was held.
    waited_s = batch.batching.counters.wait_s
    assert (waited_s[Cause.PREFIX], waited_s[Cause.CAPACITY]) == (2 * Batch.STEP_S, 0)
    assert sum(waited_s.values()) == 4 * Batch.STEP_S


def test_a_prefix_that_never_comes_is_waited_for_no_longer_than_the_bound() -> None:
    batch = Batch(is_resident=lambda chunk: False)
    batch.pulled = {"aa.1"}
    batch.arrive("aa.1")
    assert batch.names() == ["aa.1"]
    batch.arrive("aa.2")
    assert batch.names() == []
    while not (joined := batch.step()):
        assert batch.now_s <= BOUND_S + Batch.STEP_S
    assert joined == [("aa.2", Reason.OVERDUE)]


def test_a_pull_that_was_cancelled_holds_nobody() -> None:
    batch = Batch(is_resident=lambda chunk: False)
    batch.pulled = {"aa.1"}
    batch.arrive("aa.1")
    assert batch.names() == ["aa.1"]
    batch.arrive("aa.2")
    assert batch.names() == []
    batch.end("aa.1")
    assert batch.step() == [("aa.2", Reason.IDLE)]


def test_while_a_prefix_is_pulled_one_that_need_not_wait_runs() -> None:
    resident = {4}
    batching = Batching(Threshold(99), BOUND_S, lambda chunk: chunk in resident)
    for name in ("pulls", "peer", "peer too"):
        batching.insert(name, (1, 2, name.encode()), 0.0, pulls=True)
    plan = batching.plan(0.0, 8)
    assert plan.request_ids == ["pulls"], "its peers would pull the same"
    batching.settle(plan, ["pulls"], ["pulls"], 0.0)
    assert batching.plan(0.1, 8).request_ids == []
    batching.settle(batching.plan(0.1, 8), (), (), 0.1)
    batching.insert("resident", (4,), 0.2)
    plan = batching.plan(0.2, 8)
    assert [(each.member.request_id, each.joins_cohort) for each in plan.joining] == [("resident", False)]
    batching.settle(plan, ["resident"], (), 0.2)
    assert admit(batching, 0.3, 8) == [], "something runs"
    resident |= {1, 2}
    batching.loaded("pulls")
    assert sorted(admit(batching, 0.4, 8)) == ["peer", "peer too"]


def test_a_prefix_is_pulled_once_also_after_the_lead_has_changed() -> None:
    batching = Batching(Threshold(99), BOUND_S, lambda chunk: False)
    batching.insert("pulls", (1, 2), 0.0, pulls=True)
    batching.settle(batching.plan(0.0, 1), ["pulls"], ["pulls"], 0.0)
    batching.tree.finish_all()
    batching.insert("peer", (1, 2, 3), 0.1, pulls=True)
    assert admit(batching, 0.1, 8) == []
    batching.loaded("pulls")
    assert admit(batching, 0.2, 8) == ["peer"]
