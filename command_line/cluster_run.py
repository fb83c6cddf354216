"""`rachis cluster check`: a file for `ray up` and a service, checked without touching any cloud; and the dry run."""

from pathlib import Path
from typing import Any

from rich.markup import escape

from cluster_configs.schema import RachisConfig
from command_line.output import out, print_json
from control_plane.ray_cluster import check as cluster_check
from control_plane.ray_cluster import cluster_file
from control_plane.ray_cluster import plan as cluster_plan
from control_plane.ray_cluster.nodes import ClusterFile, Finding
from control_plane.ray_cluster.plan import NodePlan

_GIB = 1 << 30


def check(path: Path, config: RachisConfig | None, *, as_json: bool) -> bool:
    """Prints findings and plan; whether the cluster and the service can work. config: None checks the file alone."""
    tree = cluster_file.read(path)
    found = cluster_file.faults(tree)
    cluster = None
    plans: list[NodePlan] = []
    weights_bytes = _weights_bytes(config) if config is not None else 0
    if not found:
        cluster = cluster_file.parse(tree)
        found = cluster_check.check_file(cluster, _missing_sources(cluster))
        plans = cluster_plan.plan(cluster, config, weights_bytes)
        if config is not None:
            found += [*cluster_check.check_service(cluster, config), *cluster_plan.check_memory(plans)]
    works = not any(finding.level == "error" for finding in found)
    if as_json:
        print_json(_result(path, works, found, plans))
        return works
    if cluster is not None:
        _print_cluster(cluster)
        for one in plans:
            _print_node(one)
    if config is not None and cluster is not None and not weights_bytes and config.engine.device == "cpu":
        out.print(f"memory is without the weights of {config.model.path}, which are not on this machine")
    _print_findings(found)
    if cluster is not None and works:
        out.print(f"{path}: Ray takes it{_service_fits(cluster, config)}", markup=False)
    return works


def _service_fits(cluster: ClusterFile, config: RachisConfig | None) -> str:
    if config is None:
        return "; give --profile or --config to see which workers run where"
    return ", and the service fits" if all(one.is_known for one in cluster.node_types) else ""


def _missing_sources(cluster: ClusterFile) -> list[str]:
    return [source for _, source in cluster.mounts if not Path(source).expanduser().exists()]


def _weights_bytes(config: RachisConfig) -> int:
    """Of the model's files, where it is a folder here; else 0."""
    folder = Path(config.model.resolved_path).expanduser()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _print_cluster(cluster: ClusterFile) -> None:
    beside = [node_type for node_type in cluster.node_types if not node_type.is_head]
    least = sum(node_type.least for node_type in beside)
    most = min(sum(node_type.most for node_type in beside), cluster.most_nodes)
    nodes = f"{least} nodes" if least == most else f"{least} to {most} nodes"
    out.print(f"cluster {cluster.name} ({cluster.provider}): the head and {nodes}")
    if cluster.excludes:
        out.print(f"  of the files stay here: {', '.join(cluster.excludes)}", markup=False)


def _print_node(one: NodePlan) -> None:
    node_type = one.node_type
    count = str(node_type.least) if node_type.least == node_type.most else f"{node_type.least} to {node_type.most}"
    has = ", ".join(f"{name} {amount:g}" for name, amount in (node_type.resources or {}).items())
    details = ", ".join(part for part in (node_type.instance, has or "resources not in the file") if part)
    role = "the head" if node_type.is_head else count
    out.print(f"\n[bold]{escape(node_type.name)}[/bold]: {role}, {escape(details)}")
    for title, lines in (
        ("files", one.files),
        ("set-up", node_type.setup_commands),
        ("start", node_type.start_commands),
        ("workers", _workers(one)),
    ):
        for number, line in enumerate(lines, 1):
            out.print(f"  {title if number == 1 else '':<8} {number}. {line}", markup=False)
    if one.memory_bytes:
        out.print(f"  {'memory':<8} about {one.memory_bytes / _GIB:.1f} GiB of the host for the workers on one node")


def _workers(one: NodePlan) -> list[str]:
    lines = ["Redis, router and controller, by `rachis serve`"] if one.node_type.is_head else []
    for nodes, workers in one.workers:
        which = " and ".join(f"{number} {pool}" for pool, number in workers.items())
        lines.append(f"{which} on each of {nodes} nodes" if nodes > 1 else f"{which} on one node")
    return lines


def _print_findings(found: list[Finding]) -> None:
    if found:
        out.print()
    for finding in sorted(found, key=lambda one: one.level):
        style = "red" if finding.level == "error" else "yellow"
        out.print(f"[{style}]{finding.level}[/{style}] {escape(finding.sentence)}")


def _result(path: Path, works: bool, found: list[Finding], plans: list[NodePlan]) -> dict[str, Any]:
    return {
        "file": str(path),
        "works": works,
        "findings": [{"level": one.level, "key": one.key, "message": one.message} for one in found],
        "nodes": [
            {
                "name": one.node_type.name,
                "head": one.node_type.is_head,
                "nodes": one.node_type.least,
                "most_nodes": one.node_type.most,
                "instance": one.node_type.instance,
                "resources": dict(one.node_type.resources or {}),
                "files": list(one.files),
                "setup_commands": list(one.node_type.setup_commands),
                "start_commands": list(one.node_type.start_commands),
                "workers": [{"nodes": nodes, **workers} for nodes, workers in one.workers],
                "memory_bytes": one.memory_bytes,
            }
            for one in plans
        ],
    }
