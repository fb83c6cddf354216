"""What runs for a worker of each pool: the role of its engine, and the class of its actor on Ray."""

from typing import Any

from rachis.v1 import worker_pb2 as wire

from control_plane.model.worker_snapshot import Pool
from decode_worker.actor import DecodeWorker
from prefill_worker.actor import PrefillWorker
from shared_worker.actor import SharedWorker
from worker_runtime.engine_settings import EngineRole

ROLES: dict[Pool, EngineRole] = {
    wire.POOL_PREFILL: EngineRole.PREFILL,
    wire.POOL_DECODE: EngineRole.DECODE,
    wire.POOL_SHARED: EngineRole.SHARED,
}
ACTORS: dict[Pool, Any] = {
    wire.POOL_PREFILL: PrefillWorker,
    wire.POOL_DECODE: DecodeWorker,
    wire.POOL_SHARED: SharedWorker,
}
