"""The dry run: what `ray up` and then `rachis serve` would do on each kind of node. Pure.

Memory is an estimate of the host's, in bytes: what each worker sets aside, and what its process takes besides.
"""

from collections import Counter
from dataclasses import dataclass

from cluster_configs.schema import RachisConfig
from control_plane.ray_cluster.nodes import ClusterFile, Finding, NodeType, lay_out, warning

_GIB = 1 << 30
# Interpreter, torch and vLLM of one worker: measured with the built-in model on a CPU, a rule of thumb on a GPU. One
# that imitates a GPU has nothing else: it takes neither KV memory nor a host tier's.
_PROCESS_BYTES = {"cpu": 1 * _GIB, "cuda": 4 * _GIB, "imitated": _GIB // 2}


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Nodes that are alike. workers: for each way they are filled, how many nodes, and workers of each pool on one.
    memory_bytes: of the workers on the fullest node; None without a service."""

    node_type: NodeType
    files: tuple[str, ...]
    workers: tuple[tuple[int, dict[str, int]], ...]
    memory_bytes: int | None


def plan(cluster: ClusterFile, config: RachisConfig | None, weights_bytes: int) -> list[NodePlan]:
    """weights_bytes: of the model, 0 where it is not known here; they count in host memory where there is no GPU."""
    files = tuple(f"{remote} <- {source}" for remote, source in cluster.mounts)
    return [
        NodePlan(
            node_type,
            files,
            (filled := _filled(cluster, config, node_type)),
            _memory_bytes(config, filled, weights_bytes) if config is not None else None,
        )
        for node_type in cluster.node_types
    ]


def worker_memory_bytes(config: RachisConfig, weights_bytes: int) -> int:
    """Host memory of one worker. With `tiers.host_ratio` on a GPU its cached prefixes are not in it: they depend on the
    GPU's memory."""
    if config.engine.device == "imitated":
        return _PROCESS_BYTES["imitated"]
    on_cpu = config.engine.device == "cpu"
    kv_gib = config.engine.kv_cache_gib if on_cpu else 0.0
    host_gib = config.tiers.host_gib if config.tiers.host_ratio is None else config.tiers.host_ratio * kv_gib
    return _PROCESS_BYTES[config.engine.device] + int((kv_gib + host_gib) * _GIB) + (weights_bytes if on_cpu else 0)


def check_memory(plans: list[NodePlan]) -> list[Finding]:
    """Nodes whose file names less `memory` than their workers are estimated to take."""
    found = []
    for one in plans:
        given = (one.node_type.resources or {}).get("memory")
        if given and one.memory_bytes and one.memory_bytes > given:
            found.append(
                warning(
                    f"available_node_types.{one.node_type.name}.resources.memory",
                    f"{given / _GIB:.1f} GiB, and its workers take about {one.memory_bytes / _GIB:.1f} GiB; "
                    "lower tiers.host_gib or engine.kv_cache_gib, or take larger nodes",
                )
            )
    return found


def _filled(
    cluster: ClusterFile, config: RachisConfig | None, node_type: NodeType
) -> tuple[tuple[int, dict[str, int]], ...]:
    if config is None:
        return ()
    layout = lay_out(cluster, config.pools)
    ways = Counter(tuple(sorted(node.workers.items())) for node in layout.nodes if node.node_type is node_type)
    return tuple((nodes, dict(workers)) for workers, nodes in ways.items() if workers)


def _memory_bytes(config: RachisConfig, filled: tuple[tuple[int, dict[str, int]], ...], weights_bytes: int) -> int:
    most = max((sum(workers.values()) for _, workers in filled), default=0)
    return most * worker_memory_bytes(config, weights_bytes)
