"""Which workers are wanted, and how far each is, by what registry and Ray say."""

from collections.abc import Iterable

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.pools.roster import GONE_S, PoolWorker, Roster

PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
READY, STARTING, DRAINING = wire.WORKER_STATE_READY, wire.WORKER_STATE_STARTING, wire.WORKER_STATE_DRAINING


@pytest.fixture
def roster() -> Roster:
    return Roster({PREFILL: 1, DECODE: 2})


def record(name: str, number: int, state: wire.WorkerState.ValueType = READY) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(worker_id=name, generation=number, state=state, phase="loading")


def seen(
    roster: Roster,
    *records: wire.WorkerRegistration,
    without_node: Iterable[tuple[str, str]] = (),
    now_s: float = 0.0,
) -> None:
    roster.observe(records, dict(without_node), now_s)


def told(worker: PoolWorker) -> tuple[str, str]:
    return admin.PoolPhase.Name(worker.phase).removeprefix("POOL_PHASE_"), worker.detail


def lost(roster: Roster) -> int:
    return roster.status()[0].lost_workers


AWAY = ("STARTING", "its registration has ended, its process has not")


def test_names_are_the_lowest_that_nobody_has(roster: Roster) -> None:
    first, second, third = (roster.add(DECODE) for _ in range(3))
    roster.remove(second)

    assert [first.worker_id, third.worker_id] == [worker.worker_id for worker in roster.workers(DECODE)]
    assert roster.add(DECODE).worker_id == second.worker_id == "decode-1"
    assert roster.add(PREFILL).worker_id == "prefill-0"
    assert [worker.worker_id for worker in roster.workers()] == ["prefill-0", "decode-0", "decode-1", "decode-2"]


def test_a_worker_goes_from_pending_over_starting_to_ready(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    phases = []
    seen(roster, without_node=[("prefill-0", "no node has 1 GPU free")])
    phases.append(told(worker))
    seen(roster, without_node=[("prefill-0", "")])
    phases.append(told(worker))
    seen(roster, record("prefill-0", 5, STARTING))
    phases.append(told(worker))
    seen(roster, record("prefill-0", 5))
    phases.append(told(worker))
    seen(roster, record("prefill-0", 5, DRAINING))
    phases.append(told(worker))

    assert phases == [
        ("PENDING", "no node has 1 GPU free"),
        ("STARTING", ""),
        ("STARTING", "loading"),
        ("READY", ""),
        ("DRAINING", "takes nothing new"),
    ]
    assert lost(roster) == 0


def test_a_ready_worker_whose_process_goes_or_that_comes_back_as_another_start_is_lost_once(roster: Roster) -> None:
    roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    seen(roster, without_node=[("prefill-0", "no node has 1 GPU free")])
    seen(roster, without_node=[("prefill-0", "")])
    assert lost(roster) == 1
    seen(roster, record("prefill-0", 6))
    assert lost(roster) == 1
    seen(roster, record("prefill-0", 7, STARTING))
    assert lost(roster) == 2


def test_a_worker_whose_heartbeat_is_late_is_not_lost(roster: Roster) -> None:
    """Its process runs: the counter is of processes and nodes that go away, and its alert says so."""
    worker = roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    seen(roster)
    assert (told(worker), lost(roster)) == (AWAY, 0), "it gets nothing meanwhile"
    seen(roster, record("prefill-0", 5))
    assert (told(worker)[0], lost(roster)) == ("READY", 0)
    seen(roster)
    seen(roster, record("prefill-0", 6, STARTING))
    assert lost(roster) == 1, "the start that was late did not come back"


def test_a_worker_that_has_not_registered_for_long_is_lost_though_its_process_runs(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    for now_s in (10.0, 10.0 + GONE_S - 1.0):
        seen(roster, now_s=now_s)
        assert lost(roster) == 0
    for now_s in (10.0 + GONE_S, 11.0 + GONE_S, 200.0):
        seen(roster, now_s=now_s)
        assert (told(worker), lost(roster)) == (AWAY, 1)
    seen(roster, record("prefill-0", 5), now_s=201.0)
    seen(roster, now_s=202.0)
    assert lost(roster) == 1, "it came back, and is only late again"


def test_a_worker_that_leaves_is_not_lost(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    worker.leaves = True
    seen(roster)
    assert lost(roster) == 0
    assert roster.status()[0].desired_workers == 0


def test_a_worker_that_was_told_to_end_and_starts_again_is_not_lost(roster: Roster) -> None:
    roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    seen(roster, record("prefill-0", 5, DRAINING))
    seen(roster)
    seen(roster, record("prefill-0", 6))
    assert lost(roster) == 0
    seen(roster, without_node=[("prefill-0", "")])
    assert lost(roster) == 1


def test_a_lost_worker_whose_process_ray_has_given_up_is_to_be_fenced(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    seen(roster)
    assert roster.to_fence == {}
    seen(roster, without_node=[("prefill-0", "no node has 1 rachis_prefill free")])
    assert roster.to_fence == {"prefill-0": 5}

    seen(roster, record("prefill-0", 5))
    assert told(worker)[0] == "STARTING", "what comes back of that start counts for nothing"
    seen(roster, record("prefill-0", 6))
    assert told(worker)[0] == "READY"


def test_a_worker_that_only_did_not_reach_the_registry_may_come_back(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    seen(roster)
    seen(roster, record("prefill-0", 5))
    seen(roster, record("prefill-0", 5), without_node=[("prefill-0", "")])
    assert (told(worker)[0], roster.to_fence) == ("READY", {})


def test_a_name_that_is_used_again_does_not_take_over_what_the_registry_still_has(roster: Roster) -> None:
    first = roster.add(DECODE)
    seen(roster, record("decode-0", 7))
    roster.remove(first)
    second = roster.add(DECODE)
    seen(roster, record("decode-0", 7))
    assert (second.worker_id, told(second)) == ("decode-0", ("STARTING", ""))
    seen(roster)
    assert [status.lost_workers for status in roster.status()] == [0, 0]
    seen(roster, record("decode-0", 8))
    assert told(second)[0] == "READY"


@pytest.mark.parametrize("state", [STARTING, DRAINING])
def test_who_is_cut_off_before_or_after_it_was_ready_is_to_be_fenced_too(
    roster: Roster, state: wire.WorkerState.ValueType
) -> None:
    roster.add(PREFILL)
    seen(roster, record("prefill-0", 5, state))
    seen(roster, without_node=[("prefill-0", "")])
    assert (roster.to_fence, lost(roster)) == ({"prefill-0": 5}, 0)


def test_why_a_start_failed_is_told_until_the_next_one_says_more(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    worker.trouble = "the model is not there"
    seen(roster)
    assert told(worker) == ("STARTING", "the model is not there")
    seen(roster, record("prefill-0", 5, STARTING))
    assert told(worker) == ("STARTING", "loading")


def test_who_makes_a_pool_smaller_means_it(roster: Roster) -> None:
    workers = [roster.add(DECODE) for _ in range(3)]
    assert roster.status()[1].minimum_workers == 2
    for worker in workers[1:]:
        roster.remove(worker)
    assert roster.status()[1].minimum_workers == 1
    following = Roster({PREFILL: 1, DECODE: 4}, {DECODE: 2})
    for _ in range(4):
        following.add(DECODE)
    assert following.status()[1].minimum_workers == 2
    for worker in following.workers(DECODE)[1:]:
        following.remove(worker)
    assert following.status()[1].minimum_workers == 1


def test_who_is_not_ready_leaves_before_who_is(roster: Roster) -> None:
    for _ in range(4):
        roster.add(DECODE)
    seen(roster, record("decode-1", 1), record("decode-3", 2))
    assert [worker.worker_id for worker in roster.surplus(DECODE, 3)] == ["decode-2"]
    assert [worker.worker_id for worker in roster.surplus(DECODE, 1)] == ["decode-3", "decode-0", "decode-2"]
    assert roster.surplus(DECODE, 4) == roster.surplus(DECODE, 9) == []


def test_whoever_was_ready_and_is_away_leaves_after_those_that_were_not(roster: Roster) -> None:
    """Its answers may go on; those that start have none."""
    for _ in range(3):
        roster.add(DECODE)
    seen(roster, record("decode-1", 1), record("decode-2", 2))
    seen(roster, record("decode-1", 1))
    assert [worker.worker_id for worker in roster.surplus(DECODE, 2)] == ["decode-0"]
    assert [worker.worker_id for worker in roster.surplus(DECODE, 1)] == ["decode-2", "decode-0"]


def test_where_a_worker_answered_last_is_known_when_its_registration_has_ended(roster: Roster) -> None:
    worker = roster.add(PREFILL)
    for generation, address in ((5, "host:1"), (6, "host:2")):
        seen(roster, wire.WorkerRegistration(worker_id="prefill-0", generation=generation, address=address))
    seen(roster)
    assert (worker.seen_generation, worker.address) == (6, "host:2")


def test_what_is_to_be_fenced_is_until_that_generation_is(roster: Roster) -> None:
    roster.add(PREFILL)
    seen(roster, record("prefill-0", 5))
    seen(roster, without_node=[("prefill-0", "")])
    roster.fenced("prefill-0", 4)
    assert roster.to_fence == {"prefill-0": 5}
    roster.fenced("prefill-0", 5)
    assert roster.to_fence == {}


def test_status_tells_what_is_wanted_needed_and_ready(roster: Roster) -> None:
    for pool in (PREFILL, DECODE, DECODE, DECODE):
        roster.add(pool)
    seen(roster, record("prefill-0", 1), record("decode-1", 2))
    prefill, decode = roster.status()
    assert (prefill.desired_workers, prefill.minimum_workers, prefill.ready_workers) == (1, 1, 1)
    assert (decode.desired_workers, decode.minimum_workers, decode.ready_workers) == (3, 2, 1)
    assert [worker.worker_id for worker in decode.workers] == ["decode-0", "decode-1", "decode-2"]
