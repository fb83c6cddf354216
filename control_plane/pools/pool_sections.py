"""The pools of a service: their names, their sections of the configuration, and what they cannot be without."""

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PoolSection, PoolsSection
from control_plane.model.worker_snapshot import Pool

POOL_NAMES: dict[Pool, str] = {
    wire.POOL_PREFILL: "prefill",
    wire.POOL_DECODE: "decode",
    wire.POOL_SHARED: "shared",
}
# Without one of these nothing is served.
LEAST_WORKERS: dict[Pool, int] = {wire.POOL_DECODE: 1, wire.POOL_SHARED: 1}


def sections(pools: PoolsSection) -> dict[Pool, PoolSection]:
    """Of the pools that this service has."""
    return {pool: pools.in_use[name] for pool, name in POOL_NAMES.items() if name in pools.in_use}
