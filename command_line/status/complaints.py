"""What is wrong with a worker, in sentences that begin behind its name: for `rachis status` and for `rachis doctor`."""

from collections.abc import Iterator
from typing import NamedTuple

from rachis.v1 import admin_pb2 as admin


class Complaint(NamedTuple):
    """kind: what it is about; those of a worker: `versions`, `hangs`, `quarantine`."""

    kind: str
    sentence: str


def of_worker(view: admin.WorkerView) -> Iterator[Complaint]:
    if view.version_skew:
        yield Complaint("versions", f"gets no requests: {view.version_skew}")
    stalled_s = stalled(view)
    if stalled_s:
        yield Complaint("hangs", f"gets no requests: its engine has been in one step for {stalled_s:.0f} s")
    blocks = view.load.quarantined_blocks
    if blocks:
        yield Complaint("quarantine", f"keeps {blocks} blocks from use: a pull that was given up is not over")


def stalled(view: admin.WorkerView) -> float:
    """Seconds, as the worker says itself, or where it does not answer its registration; rounded as they are shown."""
    return round(view.load.stalled_s or view.registration.load.stalled_s, 1)
