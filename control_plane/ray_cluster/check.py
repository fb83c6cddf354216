"""Whether a service fits a cluster file: pools on nodes, ports, addresses, rules. Pure; each finding is a sentence.

The service is taken as `rachis serve --address auto` on the head would run it.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from urllib.parse import urlsplit

from cluster_configs.exposure import exposed
from cluster_configs.listening import administration_of, is_loopback
from cluster_configs.schema import PoolSection, RachisConfig
from control_plane.ray_cluster.nodes import (
    ClusterFile,
    Finding,
    Layout,
    NodeType,
    error,
    holds,
    lay_out,
    most_workers,
    named_pools,
    needs_of,
    warning,
)
from worker_runtime.engine_settings import ports_needed

_ANYWHERE = ("0.0.0.0/0", "::/0")
# Where Ray keeps its token.
_TOKEN = "~/.ray/auth_token"
_ADMIN_PORT = "router.admin_port"
_GATEWAY_PORT = "gateway.port"
_NO_PORTS = (0, 0)


def check_file(cluster: ClusterFile, missing_sources: Iterable[str]) -> list[Finding]:
    """What is wrong with the cluster file by itself. missing_sources: of its mounts, those that are not here."""
    return [*_mounts(cluster, frozenset(missing_sources)), *_commands(cluster), *_left_to_fill_in(cluster)]


def check_service(cluster: ClusterFile, config: RachisConfig) -> list[Finding]:
    """What keeps this service from running on that cluster, or from running as it is meant to."""
    return [
        *_rooms(cluster, config),
        *_nodes_without_pool(cluster, config),
        *_addresses(config),
        *_port_clashes(cluster, config),
        *_rules(cluster, config),
    ]


def _mounts(cluster: ClusterFile, missing: frozenset[str]) -> Iterator[Finding]:
    for remote, source in cluster.mounts:
        if source in missing:
            how = "`ray get-auth-token --generate` makes it" if source == _TOKEN else "give the path from here"
            yield error(f"file_mounts.{remote}", f"there is no {source} here; {how}")


def _commands(cluster: ClusterFile) -> Iterator[Finding]:
    for key in cluster.defaulted:
        yield warning(
            key, "is not in the file, so Ray takes its own, which may install another Ray; give it, even empty"
        )
    for is_head, commands in dict.fromkeys((one.is_head, one.start_commands) for one in cluster.node_types):
        starts = [command for command in commands if "ray start" in command]
        is_guarded = all("RAY_AUTH_MODE=token" in command for command in starts)
        key = f"{'head' if is_head else 'worker'}_start_ray_commands"
        if not starts:
            yield error(key, "none of them runs `ray start`, so the nodes never join")
        elif is_head and not any("--autoscaling-config" in command for command in starts):
            yield error(key, "`ray start` lacks --autoscaling-config=~/ray_bootstrap_config.yaml: no other node starts")
        if not is_guarded:
            yield warning(key, "`ray start` lacks RAY_AUTH_MODE=token: who reaches Ray's ports may run code here")


def _left_to_fill_in(cluster: ClusterFile) -> Iterator[Finding]:
    for key in cluster.placeholders:
        yield warning(key, "is left for you to fill in before `ray up`")


def _rooms(cluster: ClusterFile, config: RachisConfig) -> Iterator[Finding]:
    unknown = [node_type.name for node_type in cluster.node_types if not node_type.is_known]
    if unknown:
        yield warning(
            "metadata.hosts" if cluster.provider == "local" else "available_node_types",
            f"what {'; '.join(unknown)} has is not in the file, so whether the pools find room cannot be told; "
            "name its resources there",
        )
        return
    pools = [(name, pool) for name, pool in named_pools(config.pools) if pool.workers]
    wanted = lay_out(cluster, config.pools)
    grown = lay_out(cluster, config.pools, grown=True)
    yield from _enough_ports(config, grown)
    for name, pool in pools:
        if not any(holds(node_type, needs_of(pool)) for node_type in cluster.node_types):
            yield _no_node(cluster, name, pool)
        elif wanted.homeless[name]:
            yield error(f"pools.{name}.workers", _too_many(cluster, name, pool, pool.workers, wanted))
        else:
            yield from _waits_for_nodes(name, pool, wanted)
            if grown.homeless[name]:
                key = f"pools.{name}.autoscale.max_workers"
                yield warning(key, _too_many(cluster, name, pool, most_workers(pool), grown))


def _no_node(cluster: ClusterFile, name: str, pool: PoolSection) -> Finding:
    """No node could ever run one worker: says what the nearest one lacks."""
    needs = needs_of(pool)
    custom = {resource for node_type in cluster.node_types for resource in node_type.resources or ()} - {"CPU", "GPU"}
    if pool.node_resource is not None and pool.node_resource not in custom:
        near = get_close_matches(pool.node_resource, custom, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else "; add it to the resources of the pool's node type"
        return error(f"pools.{name}.node_resource", f"no node has a resource {pool.node_resource}{hint}")
    # Nodes that are the pool's by their resource come before others that lack as little.
    nearest, lacking = min(
        ((node_type, _lacking(node_type, needs)) for node_type in cluster.node_types),
        key=lambda one: (any(line.startswith(f"{pool.node_resource} ") for line in one[1]), len(one[1])),
    )
    return error(
        f"pools.{name}",
        f"no node can run a worker that takes {_amounts(needs)}; "
        f"the nearest, {nearest.name}, has {' and '.join(lacking)}",
    )


def _lacking(node_type: NodeType, needs: Mapping[str, float]) -> list[str]:
    has = node_type.resources or {}
    return [f"{name} {has.get(name, 0):g} of {amount:g}" for name, amount in needs.items() if has.get(name, 0) < amount]


def _too_many(cluster: ClusterFile, name: str, pool: PoolSection, workers: int, layout: Layout) -> str:
    room = workers - layout.homeless[name]
    types = ", ".join(
        f"{node_type.name} ({node_type.most} x {holds(node_type, needs_of(pool))})"
        for node_type in cluster.node_types
        if holds(node_type, needs_of(pool))
    )
    return (
        f"{workers} workers of {_amounts(needs_of(pool))} do not fit, {room} do, on {types} and at most "
        f"{cluster.most_nodes} nodes beside the head; raise max_workers there or take fewer"
    )


def _waits_for_nodes(name: str, pool: PoolSection, layout: Layout) -> Iterator[Finding]:
    added = layout.added_for(name)
    there = sum(node.workers[name] for node in layout.nodes if not node.added)
    if added and there < pool.minimum:
        yield warning(
            f"pools.{name}.min_ready",
            f"the service waits for {added} more nodes that Ray has to start first: {there} of the {pool.minimum} "
            f"workers it needs fit on what is there; raise min_workers of the node type or lower min_ready",
        )


def _enough_ports(config: RachisConfig, layout: Layout) -> Iterator[Finding]:
    ports = _own_ports(config).get("pools.ports")
    workers = max((node.workers.total() for node in layout.nodes), default=0)
    needed = workers * ports_needed(config.engine)
    if ports is not None and ports[1] - ports[0] + 1 < needed:
        yield error(
            "pools.ports", f"the {workers} workers of one node listen on {needed} ports; give that many or more"
        )


def _nodes_without_pool(cluster: ClusterFile, config: RachisConfig) -> Iterator[Finding]:
    needs = [needs_of(pool) for _, pool in named_pools(config.pools) if pool.workers]
    for node_type in cluster.node_types:
        if not node_type.is_head and node_type.resources is not None and not any(holds(node_type, n) for n in needs):
            yield warning(
                f"available_node_types.{node_type.name}" if cluster.provider != "local" else node_type.name,
                f"no pool can use these nodes, which have {_amounts(node_type.resources)}",
            )


def _addresses(config: RachisConfig) -> Iterator[Finding]:
    if config.redis.url is not None and is_loopback(urlsplit(config.redis.url).hostname or ""):
        yield error("redis.url", "is an address of this host alone, which workers on other nodes cannot reach")
    if config.redis.url is None and config.redis.host is not None and is_loopback(config.redis.host):
        yield error("redis.host", "is an address of the head alone; leave it out to take the head's own address")
    if config.pools.network is not None and ipaddress.ip_network(config.pools.network).is_loopback:
        yield error("pools.network", "is loopback: workers on other nodes cannot be reached there")
    if is_loopback(config.router.host):
        yield warning("router.host", "is loopback: clients on other hosts cannot reach the router; give 0.0.0.0")
    for field, sentence in exposed(config):
        yield error(field, sentence)


def _port_clashes(cluster: ClusterFile, config: RachisConfig) -> Iterator[Finding]:
    ours = _own_ports(config)
    listeners = [*ours.items(), *cluster.ray_ports.items()]
    for position, (key, (first, last)) in enumerate(ours.items()):
        for other, (other_first, other_last) in listeners[position + 1 :]:
            if first <= other_last and other_first <= last:
                taken = f"{other_first}-{other_last}" if other_last > other_first else str(other_first)
                yield error(key, f"clashes with {other}, which takes {taken} on the same node; give another port")


def _own_ports(config: RachisConfig) -> dict[str, tuple[int, int]]:
    """Fixed ports of the service, by key."""
    ports = {"router.port": config.router.port, "router.metrics_port": config.router.metrics_port}
    administration = administration_of(config.router)
    if administration is not None:
        ports[_ADMIN_PORT] = administration.port
    if config.gateway.port is not None:
        ports[_GATEWAY_PORT] = config.gateway.port
    if config.redis.url is None:
        ports["redis.port"] = config.redis.port
    ranges = {key: (port, port) for key, port in ports.items() if port}
    if config.pools.ports is not None:
        first, last = map(int, config.pools.ports.split("-"))
        ranges["pools.ports"] = (first, last)
    return ranges


def _rules(cluster: ClusterFile, config: RachisConfig) -> Iterator[Finding]:
    if cluster.openings is None:
        return
    key = "provider.security_group.IpPermissions"
    ours = _own_ports(config)
    meant = {ours[name] for name in ("router.port", "router.metrics_port", _GATEWAY_PORT) if name in ours}
    if is_loopback(config.gateway.host):
        # Nobody reaches it through a rule.
        meant.discard(ours.pop(_GATEWAY_PORT, _NO_PORTS))
    router = ours.get("router.port")
    if router and not any(one.first_port <= router[0] <= one.last_port for one in cluster.openings):
        yield warning(key, f"no rule lets clients reach router.port {router[0]}: they have to be nodes of the cluster")
    inside = {name: ports for name, ports in {**ours, **cluster.ray_ports}.items() if ports not in meant}
    administration = administration_of(config.router)
    if administration is not None and is_loopback(administration.host):
        inside.pop(_ADMIN_PORT, None)
    for opening in cluster.openings:
        public = [source for source in opening.sources if source in _ANYWHERE]
        for name, (first, last) in inside.items():
            if first <= opening.last_port and opening.first_port <= last:
                level = error if public else warning
                sources = ", ".join(opening.sources)
                harm = "can stop the service with an operator's key" if name == _ADMIN_PORT else "can run code here"
                yield level(key, f"opens {name} ({first}) to {sources}: who reaches it {harm}")
        if public and any(opening.first_port <= first <= opening.last_port for first, _ in meant):
            yield warning(key, f"lets {public[0]} reach the router, which asks nobody who they are; name your clients")


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"
