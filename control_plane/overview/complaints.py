"""What is wrong with a worker or with the index, in sentences: for alerts, `rachis status` and `rachis doctor`. Pure.

Sentences about a worker begin behind its name.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rachis.v1 import admin_pb2 as admin

_MOST_NAMES_SHOWN = 3


class Complaint(NamedTuple):
    """kind: what it is about; those of a worker: `versions`, `hangs`, `quarantine`."""

    kind: str
    sentence: str


def of_worker(view: admin.WorkerView) -> Iterator[Complaint]:
    if view.version_skew:
        yield Complaint("versions", f"gets no requests: {view.version_skew}")
    stalled_s = stalled(view)
    if stalled_s:
        yield Complaint(
            "hangs", f"gets no requests: its engine has been in one step, command or copy for {stalled_s:.0f} s"
        )
    blocks = view.load.quarantined_blocks
    if blocks:
        yield Complaint("quarantine", f"keeps {blocks} blocks from use: a pull that was given up is not over")


def missing_features(views: Sequence[admin.WorkerView]) -> Iterator[str]:
    """What the model cannot have where these workers run, one sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for view in views:
        for feature, reason in sorted(view.registration.model.missing_features.items()):
            features = by_reason.setdefault(reason, [])
            if feature not in features:
                features.append(feature)
    for reason, features in by_reason.items():
        yield f"no {', no '.join(features)}: {reason}"


def stalled(view: admin.WorkerView) -> float:
    """Seconds, as the worker says itself, or where it does not answer its registration; rounded as they are shown."""
    return round(view.load.stalled_s or view.registration.load.stalled_s, 1)


def complaints_of(status: admin.GetIndexStatusResponse) -> Iterator[Complaint]:
    """What is wrong with the index: `stale`, `away` (Redis is), `silent`, `behind`."""
    if status.stale:
        yield Complaint(
            "stale", f"the index is {status.staleness_s:.0f} s old and not believed: placement uses load alone"
        )
    elif not status.connected:
        yield Complaint("away", "Redis does not answer: the index stays as it is")
    silent = [worker.worker_id for worker in status.workers if worker.silent]
    if silent:
        yield Complaint("silent", f"finish requests and tell of no block: {first_names(silent)}")
    behind = [worker.worker_id for worker in status.workers if not worker.in_sync]
    if behind:
        yield Complaint("behind", f"not in sync: {first_names(behind)}")


def first_names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES_SHOWN
    shown = ", ".join(names[:_MOST_NAMES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown or "-"
