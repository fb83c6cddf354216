"""Which worker a request is sent to."""

from dataclasses import dataclass
from typing import TypeAlias

from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import WorkerId

Pool: TypeAlias = "wire.Pool.ValueType"


def serves(own: Pool, asked: Pool) -> bool:
    """Whether a worker of a pool is a candidate of the one that is asked for: who does both is one of either."""
    return own in (asked, wire.POOL_SHARED)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as it was when it was chosen: one start of it, and where it answers."""

    worker_id: WorkerId
    generation: int
    pool: Pool
    address: str
