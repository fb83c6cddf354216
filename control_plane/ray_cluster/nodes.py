"""What a cluster file says, which nodes it makes, and which workers find room on them.

Room is found as Ray finds it: a worker goes to a node that is there, else to one that Ray would add within the limits
of its type and of the cluster. Amounts are those of Ray's resources.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster_configs.schema import PoolSection, PoolsSection

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a key: what is wrong with it and what to do. `warning`: it works, but perhaps not as meant."""

    level: Literal["error", "warning"]
    key: str
    message: str

    @property
    def sentence(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


@dataclass(frozen=True, slots=True)
class NodeType:
    """Nodes that are alike. least, most: how many of them, at start and with all that Ray may add.
    resources: of one node; None where the file does not say."""

    name: str
    is_head: bool
    least: int
    most: int
    resources: Mapping[str, float] | None
    instance: str
    setup_commands: tuple[str, ...]
    start_commands: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """Whether workers can be placed here; a head of which nothing is said runs none."""
        return self.resources is not None or self.is_head


@dataclass(frozen=True, slots=True)
class Opening:
    """Ports that the file opens to sources outside of the cluster."""

    first_port: int
    last_port: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """most_nodes: beside the head. mounts: folder on a node, source here. openings: None where the file makes no rules.
    ray_ports: of the head, first and last. defaulted: command keys for which Ray's defaults are taken.
    placeholders: keys whose value the site has to fill in."""

    name: str
    provider: str
    most_nodes: int
    idle_timeout_minutes: float
    node_types: tuple[NodeType, ...]
    mounts: tuple[tuple[str, str], ...]
    excludes: tuple[str, ...]
    openings: tuple[Opening, ...] | None
    ray_ports: Mapping[str, tuple[int, int]]
    defaulted: tuple[str, ...]
    placeholders: tuple[str, ...]


@dataclass(slots=True)
class Node:
    """One node while workers are laid out. added: Ray would start it for them."""

    node_type: NodeType
    added: bool
    free: dict[str, float]
    workers: Counter[str] = field(default_factory=Counter)

    def has_room(self, needs: Mapping[str, float]) -> bool:
        return all(self.free.get(name, 0.0) >= amount - _ROUNDING for name, amount in needs.items())

    def take(self, pool: str, needs: Mapping[str, float]) -> None:
        for name, amount in needs.items():
            self.free[name] -= amount
        self.workers[pool] += 1


@dataclass(frozen=True, slots=True)
class Layout:
    """homeless: workers of each pool that find no room."""

    nodes: tuple[Node, ...]
    homeless: Mapping[str, int]

    def added_for(self, pool: str) -> int:
        """Nodes that Ray has to add before all workers of a pool run."""
        return sum(node.added and pool in node.workers for node in self.nodes)


def error(key: str, message: str) -> Finding:
    return Finding("error", key, message)


def warning(key: str, message: str) -> Finding:
    return Finding("warning", key, message)


def named_pools(pools: PoolsSection) -> list[tuple[str, PoolSection]]:
    return list(pools.in_use.items())


def needs_of(pool: PoolSection) -> dict[str, float]:
    """What Ray reserves for one worker."""
    needs = {"CPU": pool.cpus_per_worker, "GPU": pool.gpus_per_worker}
    if pool.node_resource is not None:
        needs[pool.node_resource] = 1.0
    return {name: amount for name, amount in needs.items() if amount}


def holds(node_type: NodeType, needs: Mapping[str, float]) -> int:
    """Workers that fit on an empty node; a worker that needs nothing fits once."""
    resources = node_type.resources or {}
    return min((int((resources.get(name, 0.0) + _ROUNDING) // amount) for name, amount in needs.items()), default=1)


def most_workers(pool: PoolSection) -> int:
    """Workers that a pool may have once it has grown by itself."""
    return max(pool.workers, pool.autoscale.max_workers) if pool.autoscale.enabled else pool.workers


def lay_out(cluster: ClusterFile, pools: PoolsSection, *, grown: bool = False) -> Layout:
    """Finds room for all workers: those that the pools start with, or may grow to."""
    nodes = [_empty(node_type, added=False) for node_type in cluster.node_types for _ in range(node_type.least)]
    homeless: Counter[str] = Counter()
    for name, pool in named_pools(pools):
        needs = needs_of(pool)
        for _ in range(most_workers(pool) if grown else pool.workers):
            node = _with_room(nodes, needs, spread=pool.placement_strategy == "SPREAD")
            if node is None:
                node = _another(cluster, nodes, needs)
            if node is None:
                homeless[name] += 1
            else:
                node.take(name, needs)
    return Layout(tuple(nodes), homeless)


def _empty(node_type: NodeType, *, added: bool) -> Node:
    return Node(node_type, added, dict(node_type.resources or {}))


def _with_room(nodes: Sequence[Node], needs: Mapping[str, float], *, spread: bool) -> Node | None:
    room = [node for node in nodes if node.has_room(needs)]
    return min(room, key=lambda node: node.workers.total() if spread else 0, default=None)


def _another(cluster: ClusterFile, nodes: list[Node], needs: Mapping[str, float]) -> Node | None:
    """A node that Ray would add, appended to the nodes; None where the limits forbid it."""
    if sum(not node.node_type.is_head for node in nodes) >= cluster.most_nodes:
        return None
    for node_type in cluster.node_types:
        there = sum(node.node_type is node_type for node in nodes)
        if there < node_type.most and holds(node_type, needs):
            nodes.append(_empty(node_type, added=True))
            return nodes[-1]
    return None
