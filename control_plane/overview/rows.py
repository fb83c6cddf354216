"""Workers in a line each, and their pools as sums of these: as registrations say, so that nobody is asked. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.model.worker_snapshot import Pool
from control_plane.overview import complaints

READY, SUSPECT, HANGS, OTHER_VERSION = "ready", "suspect", "hangs", "other_version"
# Of a worker that does what it is meant to do: those of the other states are told first.
_WELL = frozenset({READY, "starting"})
_SUMS = (
    "running_requests", "waiting_requests", "leased_handoffs", "open_sessions", "free_blocks", "total_blocks",
)  # fmt: skip


def state_name(state: wire.WorkerState.ValueType) -> str:
    return wire.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()


def worker_rows(views: Iterable[admin.WorkerView]) -> list[admin.WorkerRow]:
    """views: with the load of the registration. Those that need looking at come first, then the busiest."""
    return sorted(map(_row, views), key=_urgency)


def pool_sums(
    pools: Iterable[Pool], rows: Sequence[admin.WorkerRow], statuses: Sequence[admin.PoolStatus]
) -> list[admin.PoolOverview]:
    """pools: of the service. statuses: of the pools' controller; none where it runs elsewhere."""
    controlled = {status.pool: status for status in statuses}
    return [_sum(pool, [row for row in rows if row.pool == pool], controlled) for pool in pools]


def _row(view: admin.WorkerView) -> admin.WorkerRow:
    record, load = view.registration, view.registration.load
    state = _state(view)
    wrong = "; ".join(complaint.sentence for complaint in complaints.of_worker(view))
    return admin.WorkerRow(
        worker_id=record.worker_id,
        pool=record.pool,
        state=state,
        detail=wrong or (record.phase if state != READY else ""),
        node=record.node,
        in_flight_requests=view.in_flight_requests,
        **{name: getattr(load, name) for name in _SUMS},
    )


def _state(view: admin.WorkerView) -> str:
    """What keeps requests from the worker comes before what it says of itself."""
    if view.version_skew:
        return OTHER_VERSION
    if complaints.stalled(view):
        return HANGS
    return SUSPECT if view.suspect else state_name(view.registration.state)


def _urgency(row: admin.WorkerRow) -> tuple[bool, int, str]:
    busy = row.running_requests + row.waiting_requests + row.open_sessions
    return (row.state in _WELL and not row.detail, -busy, row.worker_id)


def _sum(
    pool: Pool, rows: Sequence[admin.WorkerRow], controlled: Mapping[Pool, admin.PoolStatus]
) -> admin.PoolOverview:
    summed = admin.PoolOverview(
        pool=pool,
        workers=Counter(row.state for row in rows),
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMS},
    )
    status = controlled.get(pool)
    if status is not None:
        summed.desired_workers, summed.minimum_workers = status.desired_workers, status.minimum_workers
        summed.lost_workers, summed.autoscales = status.lost_workers, status.autoscales
    return summed
