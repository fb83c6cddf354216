"""Which workers a service is meant to have, and how far each of them is. Pure: facts in, phases out.

A worker is wanted from the moment its pool has a place for it until it has left. `Roster.observe` holds the wanted
workers against the registry and against Ray. A worker that was ready is lost, and counted, when without anybody having
asked for it Ray says that its process is gone, or it registers as another start of itself. One whose registration has
gone alone is not ready: its heartbeat is late, or cannot reach Redis, and the same start may come back. After `GONE_S`
it is lost, too: it may be frozen, or cut off from Redis.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core import ids
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.pool_sections import POOL_NAMES

_PENDING, _STARTING = admin.POOL_PHASE_PENDING, admin.POOL_PHASE_STARTING
_READY, _DRAINING, _LEFT = admin.POOL_PHASE_READY, admin.POOL_PHASE_DRAINING, admin.POOL_PHASE_LEFT


# Whoever has not registered for so long, though Ray knows its process, is of no use.
GONE_S = 30.0


@dataclass(slots=True)
class PoolWorker:
    """One wanted worker.

    generation: of the start that was ready last, until it is lost; 0 before that. seen_generation: the highest that has
    registered under its name, ready or not. address: where that one answers. past_generation: what the registry still
    has up to this one counts for nothing.
    trouble: why its last start failed, as far as that is known. absent_since_s: since when it has had no registration;
    None where it has one.

    leaves: it is on its way out for good. restarts: it is being started again. is_down: its old start is being ended.
    None of that counts as a loss. stands_in: it is there while another one restarts, and is no part of the pool's size.
    """

    worker_id: str
    pool: Pool
    phase: admin.PoolPhase.ValueType = _STARTING
    detail: str = ""
    generation: int = 0
    seen_generation: int = 0
    address: str = ""
    past_generation: int = 0
    trouble: str = ""
    absent_since_s: float | None = None
    leaves: bool = False
    restarts: bool = False
    is_down: bool = False
    stands_in: bool = False

    def is_at(self, phase: admin.PoolPhase.ValueType, detail: str = "") -> None:
        self.phase, self.detail = phase, detail

    def in_words(self) -> str:
        phase = admin.PoolPhase.Name(self.phase).removeprefix("POOL_PHASE_").lower()
        return f"{phase}: {self.detail}" if self.detail else phase

    def to_wire(self) -> admin.PoolWorker:
        return admin.PoolWorker(worker_id=self.worker_id, phase=self.phase, detail=self.detail)


@dataclass(slots=True)
class Roster:
    """minimum: of each pool of the service, workers below which it is short. shrinks_to: to so many, where it follows
    its load. to_fence: generations that are not to register again, and have not been fenced yet, by worker id."""

    minimum: Mapping[Pool, int]
    shrinks_to: Mapping[Pool, int] = field(default_factory=dict)
    to_fence: dict[str, int] = field(default_factory=dict)
    _past: dict[str, int] = field(default_factory=dict)
    _workers: dict[str, PoolWorker] = field(default_factory=dict)
    _lost: dict[Pool, int] = field(default_factory=lambda: dict.fromkeys(POOL_NAMES, 0))

    def add(self, pool: Pool) -> PoolWorker:
        """One more, by the lowest name that nobody has."""
        index = 0
        while (name := ids.worker_id(POOL_NAMES[pool], index)) in self._workers:
            index += 1
        past = self._past.get(name, 0)
        worker = self._workers[name] = PoolWorker(name, pool, seen_generation=past, past_generation=past)
        return worker

    def take_over(self, worker_id: str, pool: Pool) -> PoolWorker:
        """One that runs already."""
        worker = self._workers[worker_id] = PoolWorker(worker_id, pool)
        return worker

    def remove(self, worker: PoolWorker) -> None:
        worker.is_at(_LEFT)
        self._workers.pop(worker.worker_id, None)
        # The name is used again, and the registry may still have this one for a while.
        self._past[worker.worker_id] = worker.seen_generation

    def fenced(self, worker_id: str, generation: int) -> None:
        """This generation of `to_fence` is; a later one may be to fence by now."""
        if self.to_fence.get(worker_id) == generation:
            del self.to_fence[worker_id]

    def get(self, worker_id: str) -> PoolWorker | None:
        return self._workers.get(worker_id)

    def workers(self, pool: "Pool | None" = None) -> list[PoolWorker]:
        """Of one pool or of all, by pool and number."""
        found = [worker for worker in self._workers.values() if pool in (None, worker.pool)]
        return sorted(found, key=lambda worker: (worker.pool, len(worker.worker_id), worker.worker_id))

    def staying(self, pool: Pool) -> list[PoolWorker]:
        """Those that make up the pool's size."""
        return [worker for worker in self.workers(pool) if not (worker.leaves or worker.stands_in)]

    def surplus(self, pool: Pool, size: int) -> list[PoolWorker]:
        """Who leaves for the pool to have so many: those that are not ready, then the highest numbers. Whoever was
        ready, and may still run answers, leaves after those that were not."""
        staying = sorted(self.staying(pool), key=lambda worker: (worker.phase != _READY, not worker.generation))
        return staying[size:]

    def ready(self, pool: Pool) -> int:
        return sum(worker.phase == _READY for worker in self.workers(pool))

    def observe(
        self, registrations: Iterable[wire.WorkerRegistration], without_node: Mapping[str, str], now_s: float
    ) -> None:
        """without_node: the workers that have no process, as far as Ray says, and why; empty: one is being made. now_s:
        monotonic."""
        records = {record.worker_id: record for record in registrations}
        for worker in self._workers.values():
            record = records.get(worker.worker_id)
            if record is not None:
                if record.generation >= worker.seen_generation:
                    worker.seen_generation, worker.address = record.generation, record.address
                if record.generation <= worker.past_generation:
                    record = None
            if not (worker.leaves or worker.is_down):
                self._observe(worker, record, without_node.get(worker.worker_id), now_s)

    def _observe(
        self, worker: PoolWorker, record: wire.WorkerRegistration | None, no_process: str | None, now_s: float
    ) -> None:
        if record is not None:
            worker.absent_since_s = None
        elif worker.absent_since_s is None:
            worker.absent_since_s = now_s
        if worker.generation and _is_lost(worker, record, no_process, now_s):
            self._lost[worker.pool] += 1
            worker.generation = 0
        if record is None and no_process is not None and worker.seen_generation > worker.past_generation:
            self.to_fence[worker.worker_id] = worker.past_generation = worker.seen_generation
        if record is not None and record.state == wire.WORKER_STATE_READY:
            worker.generation, worker.trouble = record.generation, ""
            worker.is_at(_READY)
        elif record is not None and record.state == wire.WORKER_STATE_DRAINING:
            # Whoever was told to end has said so: its going is no loss.
            worker.generation = 0
            worker.is_at(_DRAINING, "takes nothing new")
        elif no_process:
            worker.is_at(_PENDING, no_process)
        else:
            has_process = no_process is None and worker.seen_generation > worker.past_generation
            away = "its registration has ended, its process has not" if has_process else worker.trouble
            worker.is_at(_STARTING, record.phase if record is not None else away)

    def missing(self) -> str:
        """Who is not ready, and what it waits for."""
        late = [worker for worker in self.workers() if worker.phase != _READY and not worker.leaves]
        return "; ".join(f"{worker.worker_id} is {worker.in_words()}" for worker in late)

    def status(self) -> list[admin.PoolStatus]:
        return [self._status_of(pool) for pool in self.minimum]

    def _status_of(self, pool: Pool) -> admin.PoolStatus:
        desired = len(self.staying(pool))
        return admin.PoolStatus(
            pool=pool,
            desired_workers=desired,
            # Who makes a pool smaller means it.
            minimum_workers=min(self.minimum[pool], self.shrinks_to.get(pool, desired), desired),
            ready_workers=self.ready(pool),
            lost_workers=self._lost[pool],
            autoscales=pool in self.shrinks_to,
            workers=[worker.to_wire() for worker in self.workers(pool)],
        )


def _is_lost(worker: PoolWorker, record: wire.WorkerRegistration | None, no_process: str | None, now_s: float) -> bool:
    """Of one that was ready."""
    if record is not None:
        return record.generation != worker.generation
    absent_s = now_s - worker.absent_since_s if worker.absent_since_s is not None else 0.0
    return no_process is not None or absent_s >= GONE_S
