"""Which workers there are, as one router sees them, and what it has on each. Pure: events in, snapshots out.

A worker is usable when its registration says READY and that its engine works, its versions fit and it is not suspect.
It becomes suspect when a call to it fails, and is trusted again when it registers under a new generation, or has
answered when it was asked (`control_plane.fleet.worker_probes`): the registry is not needed for that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from cluster_core.ids import WorkerId
from cluster_core.tenant_shares import Claimant
from cluster_core.versions import Versions, differences
from control_plane.fleet.candidates import Candidates, Fixed, ahead_s, candidates, fixed_columns, queue_s
from control_plane.fleet.loads import Floats, Load, Loads, Work
from control_plane.fleet.other_routers import OtherRouters, told_lines
from control_plane.fleet.tenant_lines import behind, together
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot, serves
from worker_runtime.wire_conversion import from_wire

# A router that has said nothing new of its loads for so long is gone.
_SILENT_S = 2.0


@dataclass(slots=True)
class Member:
    """One worker. The registration is the registry's, the rest is this router's own."""

    registration: wire.WorkerRegistration
    loads: Loads
    # In `Membership.loads`.
    row: int
    # In which versions the worker differs from this router, in words; empty where they fit.
    version_skew: str = ""
    is_suspect: bool = False

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.registration.worker_id)

    @property
    def in_flight_requests(self) -> int:
        return round(self.loads.value(self.row, Load.REQUESTS))

    @property
    def in_flight_tokens(self) -> int:
        return round(self.loads.value(self.row, Load.TOKENS))


@dataclass(frozen=True, slots=True, eq=False)
class _UsablePool:
    """What does not change between two readings of the registry."""

    workers: list[WorkerSnapshot]
    rows: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    fixed: Fixed
    # Also those that are away for a while.
    registered: list[WorkerId]


@dataclass(slots=True)
class Membership:
    """The workers of one service. `now_s` is monotonic."""

    # The router's; those of the workers have to fit.
    versions: Versions = field(default_factory=Versions)
    loads: Loads = field(default_factory=Loads)
    others: OtherRouters = field(default_factory=lambda: OtherRouters(_SILENT_S))
    _members: dict[WorkerId, Member] = field(default_factory=dict)
    _pools: dict[Pool, _UsablePool] = field(default_factory=dict)

    def replace(self, registrations: Iterable[wire.WorkerRegistration]) -> bool:
        """Takes over what the registry holds now; True when anything that placement sees changed."""
        fresh = {WorkerId(record.worker_id): record for record in registrations}
        changed = fresh.keys() != self._members.keys()
        self._pools.clear()
        for gone in self._members.keys() - fresh.keys():
            self._leave(self._members.pop(gone))
        for worker_id, record in fresh.items():
            member = self._members.get(worker_id)
            if member is None or member.registration.generation != record.generation:
                if member is not None:
                    self._leave(member)
                self._members[worker_id] = Member(record, self.loads, self.loads.take_row(), self._skew(record))
                changed = True
                continue
            changed |= may_work(member.registration) != may_work(record)
            member.registration = record
        return changed

    def usable(self, pool: Pool) -> list[WorkerSnapshot]:
        """Workers that may get requests of a pool, by name: those that do both get those of either."""
        return self._pool(pool).workers

    def registered(self, pool: Pool) -> list[WorkerId]:
        """The same, and those that are suspect, start, hang or drain."""
        return self._pool(pool).registered

    def candidates(self, pool: Pool, now_s: float) -> Candidates:
        """The same with all that placement weighs."""
        usable = self._pool(pool)
        others = self.others.of(usable.workers, now_s)
        return candidates(usable.fixed, self.loads.of(usable.rows), now_s, others)

    def behind(self, pool: Pool, whose: Claimant, weight: float, own_s: Floats) -> "Floats | None":
        """(seconds, requests and tokens; workers): of the prompts that wait at those of `candidates`, what engines
        compute after one of somebody's that takes so long there. None: nothing."""
        usable = self._pool(pool)
        found: Floats = np.zeros((3, len(usable.workers)))
        for number, (worker, row) in enumerate(zip(usable.workers, usable.rows.tolist(), strict=True)):
            lines = together((self.loads.lines.of(row), *self.others.lines(worker.worker_id, worker.generation)))
            found[:, number] = behind(lines, whose, weight, float(own_s[number]))
        return found if found.any() else None

    def shares(self, now_s: float) -> list[wire.WorkerShare]:
        """What this router has on each worker, for the others."""
        busy = [member for member in self._members.values() if member.in_flight_requests]
        loads = self.loads.of(np.array([member.row for member in busy], dtype=np.int64))
        queues_s, ahead = queue_s(loads, now_s), ahead_s(loads, now_s)
        return [
            wire.WorkerShare(
                worker_id=member.worker_id,
                generation=member.registration.generation,
                requests=round(loads[Load.REQUESTS, row]),
                tokens=round(loads[Load.TOKENS, row]),
                uncomputed_tokens=round(loads[Load.UNCOMPUTED, row]),
                queue_s=queues_s[row],
                overtaken_requests=round(loads[Load.OVERTAKEN, row]),
                overtaken_tokens=round(loads[Load.OVERTAKEN_TOKENS, row]),
                ahead_s=ahead[row],
                decodes=wire.DecodeShare(
                    requests=round(loads[Load.DECODING, row]),
                    tokens=loads[Load.DECODING_TOKENS, row],
                    coming_requests=round(loads[Load.COMING, row]),
                    coming_tokens=loads[Load.COMING_TOKENS, row],
                    answer_tokens=loads[Load.ANSWER_TOKENS, row],
                ),
                arriving_requests=round(loads[Load.ARRIVING, row]),
                lines=told_lines(self.loads.lines.of(member.row)),
            )
            for row, member in enumerate(busy)
        ]

    def served_model(self) -> wire.ModelInfo:
        """Raises UnavailableError before the first worker has registered with its model."""
        for member in self.members():
            if member.registration.HasField("model"):
                return member.registration.model
        raise UnavailableError("no worker has registered yet", retry_after_ms=1000)

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.worker_id)

    def skewed(self) -> list[Member]:
        """Workers that get no requests because their versions do not fit, by name."""
        return [member for member in self.members() if member.version_skew]

    def get(self, worker_id: str) -> Member | None:
        return self._members.get(WorkerId(worker_id))

    def acquire(self, worker: WorkerSnapshot, work: Work, now_s: float) -> Member | None:
        """A request is sent to the worker; None where the worker itself is gone."""
        member = self._same_generation(worker)
        if member is not None:
            self.loads.begin(member.row, work, now_s, self._others_s(member, now_s))
        return member

    def release(self, member: Member | None, work: Work, now_s: float) -> None:
        """The request that `acquire` counted on this member has left it.

        A worker that left the registry meanwhile and came back is another member, which never had the request.
        """
        if member is not None and self._members.get(member.worker_id) is member:
            self.loads.end(member.row, work, now_s)

    def prefilled(self, member: Member | None, work: Work, now_s: float) -> None:
        """The prefill of a request that `acquire` counted is over, and it goes on there."""
        if member is not None and self._members.get(member.worker_id) is member:
            self.loads.prefilled(member.row, work, now_s, self._others_s(member, now_s))

    def _others_s(self, member: Member, now_s: float) -> float:
        return self.others.queue_s(member.worker_id, member.registration.generation, now_s)

    def suspect(self, worker: WorkerSnapshot) -> None:
        member = self._same_generation(worker)
        if member is not None:
            member.is_suspect = True
            self._pools.clear()

    def trust(self, worker: WorkerSnapshot) -> bool:
        """The worker has answered, and its engine works; True where it was suspect."""
        member = self._same_generation(worker)
        if member is None or not member.is_suspect:
            return False
        member.is_suspect = False
        self._pools.clear()
        return True

    def suspects(self) -> list[WorkerSnapshot]:
        return [_snapshot(member) for member in self._members.values() if member.is_suspect]

    def drains(self, worker: WorkerSnapshot) -> None:
        """The worker said so itself: it gets nothing more, unless the registry says otherwise."""
        member = self._same_generation(worker)
        if member is not None:
            member.registration.state = wire.WORKER_STATE_DRAINING
            self._pools.clear()

    def check_invariants(self) -> None:
        for member in self._members.values():
            assert member.in_flight_requests >= 0, f"{member.worker_id}: {member.in_flight_requests} requests"
            assert member.in_flight_tokens >= 0, f"{member.worker_id}: {member.in_flight_tokens} tokens"
            assert member.in_flight_requests > 0 or member.in_flight_tokens == 0, member.worker_id
            stands = [round(self.loads.value(member.row, each)) for each in (Load.DECODING, Load.COMING)]
            assert min(stands) >= 0 and sum(stands) <= member.in_flight_requests, f"{member.worker_id}: {stands}"
            overtaken = [round(self.loads.value(member.row, each)) for each in (Load.OVERTAKEN, Load.OVERTAKEN_TOKENS)]
            everything = [member.in_flight_requests, member.in_flight_tokens]
            assert all(0 <= part <= whole for part, whole in zip(overtaken, everything, strict=True)), overtaken

    def _same_generation(self, worker: WorkerSnapshot) -> Member | None:
        member = self._members.get(worker.worker_id)
        return member if member is not None and member.registration.generation == worker.generation else None

    def _skew(self, record: wire.WorkerRegistration) -> str:
        there = from_wire(record.versions, Versions)
        return ", ".join(differences(there, f"node {record.node}", self.versions, "the router's node"))

    def _leave(self, member: Member) -> None:
        self.loads.give_back(member.row)

    def _pool(self, pool: Pool) -> _UsablePool:
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = self._usable(pool)
        return known

    def _usable(self, pool: Pool) -> _UsablePool:
        fitting = [each for each in self.members() if serves(each.registration.pool, pool) and not each.version_skew]
        usable = [member for member in fitting if may_work(member.registration) and not member.is_suspect]
        workers = [_snapshot(member) for member in usable]
        rows = np.array([member.row for member in usable], dtype=np.int64)
        registrations = [member.registration for member in usable]
        everybody = [member.registration for member in self.members()]
        fixed = fixed_columns(workers, registrations, everybody)
        return _UsablePool(workers, rows, fixed, [each.worker_id for each in fitting])


def may_work(record: wire.WorkerRegistration) -> bool:
    """By its own account."""
    return record.state == wire.WORKER_STATE_READY and not record.load.stalled_s


def _snapshot(member: Member) -> WorkerSnapshot:
    record = member.registration
    return WorkerSnapshot(member.worker_id, record.generation, record.pool, record.address)
