"""Membership against a plain model: whatever happens in whatever order, counts fit and only the trusted are usable."""

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rachis.v1 import worker_pb2 as wire

from cluster_core.versions import Versions
from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Member, Membership
from control_plane.model.worker_snapshot import WorkerSnapshot
from tests.examples import examples

READY, DRAINING, STARTING = wire.WORKER_STATE_READY, wire.WORKER_STATE_DRAINING, wire.WORKER_STATE_STARTING


def record(
    worker_id: str,
    generation: int = 1,
    state: wire.WorkerState.ValueType = READY,
    pool: wire.Pool.ValueType = wire.POOL_DECODE,
) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(
        worker_id=worker_id, generation=generation, state=state, pool=pool, address=f"{worker_id}:{generation}"
    )


@pytest.fixture
def membership() -> Membership:
    membership = Membership()
    membership.replace([record("decode-0")])
    return membership


def only(membership: Membership) -> WorkerSnapshot:
    [worker] = membership.usable(wire.POOL_DECODE)
    return worker


def in_flight(membership: Membership) -> tuple[int, int]:
    [member] = membership.members()
    return member.in_flight_requests, member.in_flight_tokens


def test_only_ready_workers_of_the_pool_are_usable_by_name() -> None:
    membership = Membership()
    membership.replace(
        [
            record("decode-1"),
            record("decode-0"),
            record("decode-2", state=DRAINING),
            record("decode-3", state=STARTING),
            record("prefill-0", pool=wire.POOL_PREFILL),
        ]
    )

    assert [worker.worker_id for worker in membership.usable(wire.POOL_DECODE)] == ["decode-0", "decode-1"]
    assert [worker.worker_id for worker in membership.usable(wire.POOL_PREFILL)] == ["prefill-0"]


def test_a_worker_whose_versions_do_not_fit_is_not_usable_until_it_is_back_with_others() -> None:
    membership = Membership(versions=Versions("0.7.0", "0.32.0", "1.5.1"))
    fits = wire.Versions(rachis="0.7.4", vllm="0.32.0", nixl="1.5.1")
    other = record("decode-1")
    other.versions.CopyFrom(fits)
    skewed = record("decode-0")
    skewed.node = "node-b"
    skewed.versions.MergeFrom(wire.Versions(rachis="0.8.0", vllm="0.32.1", nixl="1.5.1"))
    membership.replace([skewed, other])

    assert [worker.worker_id for worker in membership.usable(wire.POOL_DECODE)] == ["decode-1"]
    assert [(member.worker_id, member.version_skew) for member in membership.skewed()] == [
        (
            "decode-0",
            "Rachis is 0.8.0 on node node-b and 0.7.0 on the router's node, "
            "vLLM is 0.32.1 on node node-b and 0.32.0 on the router's node",
        )
    ]
    back = record("decode-0", generation=2)
    back.versions.CopyFrom(fits)
    membership.replace([back, other])
    assert [worker.worker_id for worker in membership.usable(wire.POOL_DECODE)] == ["decode-0", "decode-1"]
    assert membership.skewed() == []


def test_replace_says_whether_placement_sees_a_change(membership: Membership) -> None:
    assert membership.replace([record("decode-0")]) is False
    assert membership.replace([record("decode-0", state=DRAINING)]) is True
    assert membership.replace([record("decode-0", generation=2)]) is True
    assert membership.replace([record("decode-0", generation=2), record("decode-1")]) is True
    assert membership.replace([]) is True
    assert membership.replace([]) is False


def test_a_suspect_worker_is_trusted_again_once_it_has_answered_and_not_for_its_registration(
    membership: Membership,
) -> None:
    worker = only(membership)
    membership.suspect(worker)
    assert membership.usable(wire.POOL_DECODE) == []
    assert membership.suspects() == [worker]

    assert membership.replace([record("decode-0")]) is False
    assert membership.usable(wire.POOL_DECODE) == []

    assert membership.trust(worker) is True
    assert only(membership) == worker
    assert membership.trust(worker) is False
    assert membership.suspects() == []


def test_an_answer_of_an_earlier_generation_trusts_nobody(membership: Membership) -> None:
    stale = only(membership)
    membership.replace([record("decode-0", generation=2)])
    membership.suspect(only(membership))

    assert membership.trust(stale) is False
    assert membership.usable(wire.POOL_DECODE) == []


def test_a_worker_whose_engine_hangs_by_its_own_account_gets_nothing_until_it_goes_on(membership: Membership) -> None:
    hanging = record("decode-0")
    hanging.load.stalled_s = 2.0

    assert membership.replace([hanging]) is True
    assert membership.usable(wire.POOL_DECODE) == []
    assert membership.replace([record("decode-0")]) is True
    assert only(membership).worker_id == "decode-0"


def test_a_suspect_worker_is_trusted_at_once_under_a_new_generation(membership: Membership) -> None:
    membership.suspect(only(membership))

    membership.replace([record("decode-0", generation=2)])

    assert only(membership).generation == 2


def test_suspicion_of_an_earlier_generation_is_ignored(membership: Membership) -> None:
    stale = only(membership)
    membership.replace([record("decode-0", generation=2)])

    membership.suspect(stale)

    assert only(membership).generation == 2


def test_a_release_for_an_earlier_generation_is_ignored(membership: Membership) -> None:
    stale = membership.acquire(only(membership), Work(7), 0.0)
    membership.replace([record("decode-0", generation=2)])
    assert in_flight(membership) == (0, 0)
    membership.acquire(only(membership), Work(5), 0.0)

    membership.release(stale, Work(7), 0.0)

    assert in_flight(membership) == (1, 5)
    membership.check_invariants()


def test_a_release_after_the_worker_is_gone_is_ignored(membership: Membership) -> None:
    worker = membership.acquire(only(membership), Work(7), 0.0)
    membership.replace([])

    membership.release(worker, Work(7), 0.0)

    assert membership.members() == []


def test_a_worker_that_left_and_came_back_under_its_generation_does_not_count_below_zero(
    membership: Membership,
) -> None:
    before = membership.acquire(only(membership), Work(101), 0.0)
    membership.replace([])
    membership.replace([record("decode-0")])
    after = membership.acquire(only(membership), Work(100), 0.0)

    membership.release(before, Work(101), 0.0)

    assert in_flight(membership) == (1, 100)
    membership.check_invariants()
    membership.release(after, Work(100), 0.0)
    assert in_flight(membership) == (0, 0)


def test_in_flight_counts_outlive_a_renewal(membership: Membership) -> None:
    membership.acquire(only(membership), Work(7), 0.0)

    membership.replace([record("decode-0", state=DRAINING)])

    assert in_flight(membership) == (1, 7)


def test_check_invariants_finds_a_release_too_many(membership: Membership) -> None:
    membership.release(membership.members()[0], Work(1), 0.0)

    with pytest.raises(AssertionError, match="decode-0"):
        membership.check_invariants()


class MembershipMachine(RuleBasedStateMachine):
    """Random events on three workers, next to what each call should have left behind."""

    names = st.sampled_from(["decode-0", "decode-1", "prefill-0"])

    @initialize()
    def start(self) -> None:
        self.membership = Membership()
        self.now_s = 0.0
        self.generations = itertools.count(1)
        self.records: dict[str, wire.WorkerRegistration] = {}
        self.held: list[tuple[WorkerSnapshot, Member | None, int]] = []
        self.suspects: dict[str, WorkerSnapshot] = {}

    @rule(name=names, state=st.sampled_from([READY, DRAINING, STARTING]))
    def register(self, name: str, state: wire.WorkerState.ValueType) -> None:
        pool = wire.POOL_PREFILL if name.startswith("prefill") else wire.POOL_DECODE
        self.records[name] = record(name, next(self.generations), state, pool)
        self.suspects.pop(name, None)
        self._replace()

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.records.pop(name, None)
        self.suspects.pop(name, None)
        self._replace()

    @rule(passed_s=st.floats(0, 8))
    def renew(self, passed_s: float) -> None:
        self.now_s += passed_s
        self._replace()

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.suspects:
            name = data.draw(st.sampled_from(sorted(self.suspects)))
            assert self.membership.trust(self.suspects.pop(name))

    @rule(data=st.data(), tokens=st.integers(1, 50))
    def acquire(self, data: st.DataObject, tokens: int) -> None:
        usable = self.membership.usable(wire.POOL_DECODE) + self.membership.usable(wire.POOL_PREFILL)
        if usable:
            worker = data.draw(st.sampled_from(usable))
            self.held.append((worker, self.membership.acquire(worker, Work(tokens), self.now_s), tokens))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            _, member, tokens = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.membership.release(member, Work(tokens), self.now_s)

    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        if self.held:
            worker, _, _ = data.draw(st.sampled_from(self.held))
            self.membership.suspect(worker)
            current = self.records.get(worker.worker_id)
            if current is not None and current.generation == worker.generation:
                self.suspects[worker.worker_id] = worker

    @invariant()
    def counts_are_what_is_held_on_this_generation(self) -> None:
        self.membership.check_invariants()
        for member in self.membership.members():
            mine = [tokens for _, acquired, tokens in self.held if acquired is member]
            assert (member.in_flight_requests, member.in_flight_tokens) == (len(mine), sum(mine))

    @invariant()
    def usable_are_the_ready_and_trusted(self) -> None:
        for pool in (wire.POOL_PREFILL, wire.POOL_DECODE):
            expected = sorted(
                name
                for name, known in self.records.items()
                if known.pool == pool and known.state == READY and name not in self.suspects
            )
            assert [worker.worker_id for worker in self.membership.usable(pool)] == expected

    def _replace(self) -> None:
        self.membership.replace(self.records.values())


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = examples(60, steps=30)


def test_candidates_are_frozen(membership: Membership) -> None:
    before = membership.candidates(wire.POOL_DECODE, 0.0)
    membership.acquire(only(membership), Work(9, 4, 2.0), 0.0)
    after = membership.candidates(wire.POOL_DECODE, 0.5)

    assert (before.in_flight_requests[0], before.in_flight_tokens[0], before.queue_s[0]) == (0, 0, 0)
    assert (after.in_flight_requests[0], after.in_flight_tokens[0], after.uncomputed_tokens[0]) == (1, 9, 4)
    assert after.queue_s[0] == 1.5


def test_a_queue_is_as_long_as_what_is_left_of_it(membership: Membership) -> None:
    def queue_s(now_s: float) -> float:
        return float(membership.candidates(wire.POOL_DECODE, now_s).queue_s[0])

    works = [Work(1, 1, 2.0), Work(1, 1, 3.0)]
    members = [membership.acquire(only(membership), work, 10.0) for work in works]
    assert queue_s(11.0) == 4.0
    membership.prefilled(members[0], works[0], 11.0)
    assert queue_s(11.0) == 3.0, "the second one begins when the first has ended, sooner than it was expected to"
    assert queue_s(20.0) == 6.0, "who is late may be late for as long again"
    late = membership.acquire(only(membership), Work(1, 1, 1.0), 20.0)
    assert queue_s(20.0) == 7.0, "what comes on top does not make good for it"
    membership.release(late, Work(1, 1, 1.0), 20.0)
    assert queue_s(20.0) == 6.0, "one that is given up is no progress of the worker's"
    membership.prefilled(members[1], works[1], 20.0)
    assert queue_s(20.0) == 0.0


def test_a_worker_that_hangs_gets_ever_less(membership: Membership) -> None:
    """One that never answers against one that takes a second for each request."""
    membership.replace([record("decode-0"), record("decode-1")])
    sent = {"decode-0": 0, "decode-1": 0}
    running: list[tuple[float, Any]] = []
    work = Work(10, 10, 1.0)
    for tick in range(1000):
        now_s = float(tick)
        for done_s, member in [each for each in running if each[0] <= now_s]:
            membership.prefilled(member, work, now_s)
            membership.release(member, Work(work.tokens), 20.0)
            running.remove((done_s, member))
        found = membership.candidates(wire.POOL_DECODE, now_s)
        row = int(found.queue_s.argmin())
        member = membership.acquire(found.workers[row], work, now_s)
        sent[found.workers[row].worker_id] += 1
        if row == 1:
            running.append((now_s + 1.0, member))
    assert sent["decode-0"] < 5


def test_a_session_is_not_late(membership: Membership) -> None:
    """Its prompt comes when it comes."""
    work = Work(10, 10, 2.0, arriving=True)
    member = membership.acquire(only(membership), work, 0.0)
    queues = [float(membership.candidates(wire.POOL_DECODE, now_s).queue_s[0]) for now_s in (0.0, 1.0, 50.0)]
    assert queues == [2.0, 1.0, 0.0]
    membership.release(member, work, 50.0)
    membership.check_invariants()


def test_a_prefill_that_is_over_leaves_its_request_behind(membership: Membership) -> None:
    work = Work(10, 8, 2.0)
    member = membership.acquire(only(membership), work, 0.0)
    membership.prefilled(member, work, 1.0)
    found = membership.candidates(wire.POOL_DECODE, 1.0)
    assert (found.queue_s[0], found.in_flight_requests[0], found.in_flight_tokens[0]) == (0, 1, 10)
    membership.release(member, Work(10), 0.0)
    assert in_flight(membership) == (0, 0)


def test_a_row_is_another_worker_s_once_its_own_is_gone(membership: Membership) -> None:
    member = membership.acquire(only(membership), Work(7), 0.0)
    membership.replace([record("decode-7")])
    assert in_flight(membership) == (0, 0)

    membership.release(member, Work(7), 0.0)

    membership.check_invariants()
    assert in_flight(membership) == (0, 0)


def test_more_workers_than_rows_keep_their_loads() -> None:
    membership = Membership()
    names = [f"decode-{index}" for index in range(40)]
    membership.replace([record(name) for name in names[:5]])
    for index, worker in enumerate(membership.usable(wire.POOL_DECODE)):
        membership.acquire(worker, Work(index + 1), 0.0)
    membership.replace([record(name) for name in names])

    found = membership.candidates(wire.POOL_DECODE, 1.0)

    tokens = dict(zip([each.worker_id for each in found.workers], found.in_flight_tokens, strict=True))
    assert {name: count for name, count in tokens.items() if count} == {names[index]: index + 1 for index in range(5)}


def test_a_worker_that_says_it_drains_gets_nothing_until_the_registry_says_otherwise(membership: Membership) -> None:
    worker = only(membership)
    membership.drains(worker)
    assert membership.usable(wire.POOL_DECODE) == []
    membership.replace([record("decode-0", generation=worker.generation)])
    assert only(membership) == worker
    membership.replace([record("decode-0", generation=worker.generation + 1)])
    membership.drains(worker)
    assert only(membership).generation == worker.generation + 1, "an earlier start's word is not this one's"
