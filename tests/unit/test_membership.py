"""Membership against a plain model: whatever happens in whatever order, counts fit and only the trusted are usable."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rachis.v1 import worker_pb2 as wire

from control_plane.membership import Member, Membership, WorkerSnapshot

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
    membership = Membership(trust_after_s=5.0)
    membership.replace([record("decode-0")], 0.0)
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
        ],
        0.0,
    )

    assert [worker.worker_id for worker in membership.usable(wire.POOL_DECODE)] == ["decode-0", "decode-1"]
    assert [worker.worker_id for worker in membership.usable(wire.POOL_PREFILL)] == ["prefill-0"]


def test_replace_says_whether_placement_sees_a_change(membership: Membership) -> None:
    assert membership.replace([record("decode-0")], 1.0) is False
    assert membership.replace([record("decode-0", state=DRAINING)], 2.0) is True
    assert membership.replace([record("decode-0", generation=2)], 3.0) is True
    assert membership.replace([record("decode-0", generation=2), record("decode-1")], 4.0) is True
    assert membership.replace([], 5.0) is True
    assert membership.replace([], 6.0) is False


def test_a_suspect_worker_is_trusted_again_once_renewed_for_long_enough(membership: Membership) -> None:
    membership.suspect(only(membership), 10.0)
    assert membership.usable(wire.POOL_DECODE) == []

    assert membership.replace([record("decode-0")], 14.9) is False
    assert membership.usable(wire.POOL_DECODE) == []

    assert membership.replace([record("decode-0")], 15.0) is True
    assert only(membership).worker_id == "decode-0"


def test_a_suspect_worker_is_trusted_at_once_under_a_new_generation(membership: Membership) -> None:
    membership.suspect(only(membership), 10.0)

    membership.replace([record("decode-0", generation=2)], 10.1)

    assert only(membership).generation == 2


def test_suspicion_of_an_earlier_generation_is_ignored(membership: Membership) -> None:
    stale = only(membership)
    membership.replace([record("decode-0", generation=2)], 1.0)

    membership.suspect(stale, 2.0)

    assert only(membership).generation == 2


def test_a_release_for_an_earlier_generation_is_ignored(membership: Membership) -> None:
    stale = membership.acquire(only(membership), 7)
    membership.replace([record("decode-0", generation=2)], 1.0)
    assert in_flight(membership) == (0, 0)
    membership.acquire(only(membership), 5)

    membership.release(stale, 7)

    assert in_flight(membership) == (1, 5)
    membership.check_invariants()


def test_a_release_after_the_worker_is_gone_is_ignored(membership: Membership) -> None:
    worker = membership.acquire(only(membership), 7)
    membership.replace([], 1.0)

    membership.release(worker, 7)

    assert membership.members() == []


def test_a_worker_that_left_and_came_back_under_its_generation_does_not_count_below_zero(
    membership: Membership,
) -> None:
    before = membership.acquire(only(membership), 101)
    membership.replace([], 1.0)
    membership.replace([record("decode-0")], 2.0)
    after = membership.acquire(only(membership), 100)

    membership.release(before, 101)

    assert in_flight(membership) == (1, 100)
    membership.check_invariants()
    membership.release(after, 100)
    assert in_flight(membership) == (0, 0)


def test_in_flight_counts_outlive_a_renewal(membership: Membership) -> None:
    membership.acquire(only(membership), 7)

    membership.replace([record("decode-0", state=DRAINING)], 1.0)

    assert in_flight(membership) == (1, 7)


def test_check_invariants_finds_a_release_too_many(membership: Membership) -> None:
    membership.release(membership.members()[0], 1)

    with pytest.raises(AssertionError, match="decode-0"):
        membership.check_invariants()


class MembershipMachine(RuleBasedStateMachine):
    """Random events on three workers, next to what each call should have left behind."""

    names = st.sampled_from(["decode-0", "decode-1", "prefill-0"])

    @initialize()
    def start(self) -> None:
        self.membership = Membership(trust_after_s=5.0)
        self.now_s = 0.0
        self.generations = itertools.count(1)
        self.records: dict[str, wire.WorkerRegistration] = {}
        self.held: list[tuple[WorkerSnapshot, Member | None, int]] = []
        self.suspects: dict[str, float] = {}

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
        self.suspects = {name: since for name, since in self.suspects.items() if self.now_s - since < 5.0}
        self._replace()

    @rule(data=st.data(), tokens=st.integers(1, 50))
    def acquire(self, data: st.DataObject, tokens: int) -> None:
        usable = self.membership.usable(wire.POOL_DECODE) + self.membership.usable(wire.POOL_PREFILL)
        if usable:
            worker = data.draw(st.sampled_from(usable))
            self.held.append((worker, self.membership.acquire(worker, tokens), tokens))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            _, member, tokens = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.membership.release(member, tokens)

    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        if self.held:
            worker, _, _ = data.draw(st.sampled_from(self.held))
            self.membership.suspect(worker, self.now_s)
            current = self.records.get(worker.worker_id)
            if current is not None and current.generation == worker.generation:
                self.suspects[worker.worker_id] = self.now_s

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
        self.suspects = {name: since for name, since in self.suspects.items() if self.now_s - since < 5.0}
        self.membership.replace(self.records.values(), self.now_s)


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_snapshot_is_frozen(membership: Membership) -> None:
    worker = only(membership)
    membership.acquire(worker, 9)

    assert worker == replace(worker, in_flight_tokens=0, in_flight_requests=0)
