"""The part of `rachis status` about the prefix index: how large it is, how far it follows the workers, its alarms."""

from typing import Any

from rachis.v1 import admin_pb2 as admin

from command_line.output import short_number
from control_plane.overview.complaints import complaints_of


def status_of(status: admin.GetIndexStatusResponse) -> dict[str, Any]:
    """For `--json`."""
    return {
        "entries": status.entries,
        "capacity_entries": status.capacity_entries,
        "bytes": status.bytes,
        "dropped": status.dropped,
        "chunk_tokens": status.chunk_tokens,
        "connected": status.connected,
        "staleness_s": round(status.staleness_s, 3),
        "stale": status.stale,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "generation": worker.generation,
                "sequence": worker.sequence,
                "lag_batches": worker.lag_batches,
                "in_sync": worker.in_sync,
                "silent": worker.silent,
            }
            for worker in status.workers
        ],
        "counts": {
            name: getattr(status, name) for name in ("batches", "keys", "duplicates", "gaps", "resyncs", "damaged")
        },
        "load_only_decisions": status.load_only_decisions,
        "disaggregation": dict(status.disaggregation),
        "alarms": [complaint.sentence for complaint in complaints_of(status)],
    }


def index_line(status: dict[str, Any]) -> str:
    """The index in one line; `status` as `status_of` gives it."""
    return (
        f"index: {short_number(status['entries'])} of {short_number(status['capacity_entries'])} chunks of "
        f"{status['chunk_tokens']} tokens, {status['dropped']} forgotten for hotter ones, "
        f"{len(status['workers'])} workers followed, {status['staleness_s']:.1f} s old"
    )
