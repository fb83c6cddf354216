"""Which workers there are, as one router sees them, and what it has on each. Pure: events in, snapshots out.

A worker is usable when its registration says READY and it is not suspect. It becomes suspect when a call to it
fails, and is trusted again when it registers under a new generation, or when its registration has been renewed for
`trust_after_s` since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from cluster_core.ids import WorkerId

Pool: TypeAlias = "wire.Pool.ValueType"


@dataclass(slots=True)
class Member:
    """One worker. The registration is the registry's, the rest is this router's own."""

    registration: wire.WorkerRegistration
    in_flight_requests: int = 0
    in_flight_tokens: int = 0
    suspect_since_s: float | None = None

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.registration.worker_id)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What placement sees of a worker. Tokens count prompt and completion of what is in flight."""

    worker_id: WorkerId
    generation: int
    pool: Pool
    address: str
    in_flight_requests: int
    in_flight_tokens: int
    max_running_requests: int


@dataclass(slots=True)
class Membership:
    """The workers of one service. `now_s` is monotonic."""

    trust_after_s: float = 5.0
    _members: dict[WorkerId, Member] = field(default_factory=dict)

    def replace(self, registrations: Iterable[wire.WorkerRegistration], now_s: float) -> bool:
        """Takes over what the registry holds now; True when anything that placement sees changed."""
        fresh = {WorkerId(record.worker_id): record for record in registrations}
        changed = fresh.keys() != self._members.keys()
        for gone in self._members.keys() - fresh.keys():
            del self._members[gone]
        for worker_id, record in fresh.items():
            member = self._members.get(worker_id)
            if member is None or member.registration.generation != record.generation:
                self._members[worker_id] = Member(record)
                changed = True
                continue
            changed |= member.registration.state != record.state
            member.registration = record
            if member.suspect_since_s is not None and now_s - member.suspect_since_s >= self.trust_after_s:
                member.suspect_since_s = None
                changed = True
        return changed

    def usable(self, pool: Pool) -> list[WorkerSnapshot]:
        """Workers of a pool that may get requests, by name."""
        members = sorted(self._members.values(), key=lambda member: member.worker_id)
        return [
            _snapshot(member)
            for member in members
            if member.registration.pool == pool
            and member.registration.state == wire.WORKER_STATE_READY
            and member.suspect_since_s is None
        ]

    def served_model(self) -> wire.ModelInfo:
        """Raises UnavailableError before the first worker has registered with its model."""
        for member in self.members():
            if member.registration.HasField("model"):
                return member.registration.model
        raise UnavailableError("no worker has registered yet", retry_after_ms=1000)

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.worker_id)

    def get(self, worker_id: str) -> Member | None:
        return self._members.get(WorkerId(worker_id))

    def acquire(self, worker: WorkerSnapshot, tokens: int) -> Member | None:
        """A request of so many tokens is sent to the worker; None where the worker itself is gone."""
        member = self._same_generation(worker)
        if member is not None:
            member.in_flight_requests += 1
            member.in_flight_tokens += tokens
        return member

    @staticmethod
    def release(member: Member | None, tokens: int) -> None:
        """The request that `acquire` counted on this member has left it.

        A worker that left the registry meanwhile and came back is another member, which never had the request.
        """
        if member is not None:
            member.in_flight_requests -= 1
            member.in_flight_tokens -= tokens

    def suspect(self, worker: WorkerSnapshot, now_s: float) -> None:
        member = self._same_generation(worker)
        if member is not None:
            member.suspect_since_s = now_s

    def check_invariants(self) -> None:
        for member in self._members.values():
            assert member.in_flight_requests >= 0, f"{member.worker_id}: {member.in_flight_requests} requests"
            assert member.in_flight_tokens >= 0, f"{member.worker_id}: {member.in_flight_tokens} tokens"
            assert member.in_flight_requests > 0 or member.in_flight_tokens == 0, member.worker_id

    def _same_generation(self, worker: WorkerSnapshot) -> Member | None:
        member = self._members.get(worker.worker_id)
        return member if member is not None and member.registration.generation == worker.generation else None


def _snapshot(member: Member) -> WorkerSnapshot:
    record = member.registration
    return WorkerSnapshot(
        worker_id=member.worker_id,
        generation=record.generation,
        pool=record.pool,
        address=record.address,
        in_flight_requests=member.in_flight_requests,
        in_flight_tokens=member.in_flight_tokens,
        max_running_requests=record.max_running_requests,
    )
