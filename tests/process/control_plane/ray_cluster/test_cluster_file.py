"""`rachis cluster check`: the shipped files pass, and every planted fault is told in a sentence that names its key."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ResourceRequestByCount

from cluster_configs import loading
from cluster_configs.schema import RachisConfig
from cluster_core.errors import ConfigError
from control_plane.ray_cluster import check as cluster_check
from control_plane.ray_cluster import cluster_file
from control_plane.ray_cluster import plan as cluster_plan
from control_plane.ray_cluster.nodes import ClusterFile, Finding, lay_out, named_pools, needs_of
from tests import ROOT
from tests.command import rachis

SHIPPED = sorted((ROOT / "cluster_configs" / "ray").glob("*.yaml"))
RULES = "provider.security_group.IpPermissions"
DECODE = "available_node_types.decode.resources"
SERVICES = {"gpu": "gpu-pools", "cpu": "cpu-pools"}


def shipped(name: str) -> dict[str, Any]:
    return cluster_file.read(ROOT / "cluster_configs" / "ray" / f"{name}.yaml")


def service(kind: str = "gpu", **flags: Any) -> RachisConfig:
    file = ROOT / "cluster_configs" / "service" / f"{kind}.yaml"
    return loading.load(profile=SERVICES[kind], file=file, flags=flags).config


def put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tree with another value under a dotted key; ... takes the key out."""
    changed = copy.deepcopy(tree)
    *parents, last = key.split(".")
    inner = changed
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return changed


def problems(tree: dict[str, Any], config: RachisConfig | None = None) -> dict[str, str]:
    """Sentences of all findings by level and key, but for what is left to fill in."""
    return {
        f"{finding.level} {finding.key}": finding.message
        for finding in found(tree, config)
        if "fill in" not in finding.message
    }


def found(tree: dict[str, Any], config: RachisConfig | None) -> list[Finding]:
    faults = cluster_file.faults(tree)
    if faults:
        return faults
    cluster = cluster_file.parse(tree)
    findings = cluster_check.check_file(cluster, ())
    return findings + (cluster_check.check_service(cluster, config) if config is not None else [])


def parsed(name: str = "aws") -> ClusterFile:
    return cluster_file.parse(shipped(name))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_passes_rays_schema_and_rules(path: Path) -> None:
    tree = cluster_file.read(path)
    assert cluster_file.faults(tree) == []
    assert [
        finding for finding in cluster_check.check_file(cluster_file.parse(tree), ()) if finding.level == "error"
    ] == []


def test_three_files_are_shipped() -> None:
    assert [path.stem for path in SHIPPED] == ["aws", "gcp", "onprem"]


def test_rays_token_that_is_not_there_is_told_with_how_it_is_made() -> None:
    (told,) = [
        finding
        for finding in cluster_check.check_file(parsed("aws"), ["~/.ray/auth_token"])
        if finding.key.startswith("file_mounts")
    ]
    assert (told.level, told.key) == ("error", "file_mounts.~/.ray/auth_token")
    assert told.message == "there is no ~/.ray/auth_token here; `ray get-auth-token --generate` makes it"


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_ray_that_asks_for_no_token_is_warned_of(role: str) -> None:
    tree, key = shipped("onprem"), f"{role}_start_ray_commands"
    tree[key] = [command.replace("RAY_AUTH_MODE=token ", "") for command in tree[key]]
    told = problems(tree)
    assert set(told) == {f"warning {key}"} and "lacks RAY_AUTH_MODE=token" in told[f"warning {key}"]


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_shipped_service_fits_the_shipped_cluster(name: str) -> None:
    assert problems(shipped(name), service("gpu")) == {}


def test_shipped_service_without_gpus_fits_nodes_without_gpus() -> None:
    tree = shipped("aws")
    for pool in ("prefill", "decode"):
        tree["available_node_types"][pool]["resources"] = {"CPU": 16, f"rachis_{pool}": 2}
    assert problems(tree, service("cpu")) == {}


def test_every_shipped_file_mounts_the_project_and_starts_ray_on_the_same_ports() -> None:
    clusters = [parsed(path.stem) for path in SHIPPED]
    assert len({tuple(cluster.ray_ports.items()) for cluster in clusters}) == 1
    for cluster in clusters:
        assert ("~/rachis", ".") in cluster.mounts
        assert ("~/.ray/auth_token", "~/.ray/auth_token") in cluster.mounts
        for node_type in cluster.node_types:
            assert any("make -C ~/rachis setup" in command for command in node_type.setup_commands)


@pytest.mark.parametrize(
    ("name", "key", "value", "expected", "words"),
    [
        ("aws", "max_worker", 3, "error max_worker", "did you mean `max_workers`"),
        ("aws", "cluster_name", ..., "error cluster_name", "is missing"),
        ("gcp", DECODE, ..., f"error {DECODE}", "is missing"),
        ("aws", f"{DECODE}s", 1, f"error {DECODE}s", "did you mean `resources`"),
        ("aws", "max_workers", "many", "error max_workers", "integer"),
        ("aws", DECODE, {"GPU": 0.5}, f"error {DECODE}.GPU", ""),
        ("aws", "setup_commands", "make", "error setup_commands", "array"),
        ("aws", "max_workers", 2, "error ", "smaller than the sum of `min_workers`"),
        ("aws", "head_node_type", "boss", "error ", "head_node_type"),
        ("aws", "provider.type", "cloud9", "error ", "cloud9"),
        ("onprem", "provider.worker_ips", ..., "error ", "worker_ips"),
        ("onprem", "available_node_types", {"a": {"resources": {}, "node_config": {}}}, "error ", "not supported"),
        ("aws", "setup_commands", ..., "warning setup_commands", "another Ray"),
        ("aws", "worker_start_ray_commands", ["echo"], "error worker_start_ray_commands", "never join"),
        ("aws", "head_start_ray_commands", ["ray start --head"], "error head_start_ray_commands", "--autoscaling"),
    ],
)  # fmt: skip
def test_fault_in_the_file_is_told_with_its_key(name: str, key: str, value: Any, expected: str, words: str) -> None:
    told = problems(put(shipped(name), key, value))
    assert expected in told, told
    assert words in told[expected]


@pytest.mark.parametrize(
    ("key", "value", "flags", "expected", "words"),
    [
        (DECODE, {"CPU": 8, "GPU": 1, "rachis_decod": 1}, {},
         "error pools.decode.node_resource", "did you mean `rachis_decod`?"),
        # A pool that fits nowhere, one that fits but not as often, and one that waits for nodes.
        (DECODE, {"CPU": 8, "GPU": 1}, {},
         "error pools.decode.node_resource", "no node has a resource rachis_decode; add it"),
        (DECODE, {"CPU": 4, "GPU": 1, "rachis_decode": 1}, {},
         "error pools.decode", "the nearest, decode, has CPU 4 of 8"),
        ("available_node_types.decode.max_workers", 2, {"pools.decode.workers": 3},
         "error pools.decode.workers", "GPU 1, rachis_decode 1 do not fit, 2 do, on decode (2 x 1)"),
        ("max_workers", 5, {"pools.prefill.workers": 4}, "error pools.prefill.workers", "at most 5 nodes"),
        ("available_node_types.prefill.min_workers", 0, {}, "warning pools.prefill.min_ready", "for 2 more nodes"),
        ("cluster_name", "big",
         {"pools.decode.autoscale.enabled": True, "pools.decode.autoscale.max_workers": 9},
         "warning pools.decode.autoscale.max_workers", "9 workers"),
        ("available_node_types.other", {"node_config": {}, "resources": {"CPU": 4}}, {},
         "warning available_node_types.other", "no pool can use these nodes, which have CPU 4"),
        (DECODE, {}, {}, "warning available_node_types", "what decode has is not in"),
        # Addresses that only one host reaches.
        ("cluster_name", "c", {"redis.url": "redis://localhost:6379/0"}, "error redis.url", "this host alone"),
        ("cluster_name", "c", {"redis.host": "127.0.0.1"}, "error redis.host", "the head alone"),
        ("cluster_name", "c", {"pools.network": "127.0.0.0/8"}, "error pools.network", "loopback"),
        ("cluster_name", "c", {"router.host": "127.0.0.1"}, "warning router.host", "loopback"),
        # Ports.
        ("cluster_name", "c", {"redis.port": 6379}, "error redis.port", "clashes with Ray's control service"),
        ("cluster_name", "c", {"router.port": 9421}, "error router.port", "clashes with router.metrics_port"),
        ("cluster_name", "c", {"gateway.port": 7421}, "error router.port", "clashes with gateway.port"),
        ("cluster_name", "c", {"gateway.port": 10500}, "error gateway.port", "clashes with Ray's workers"),
        ("cluster_name", "c", {"pools.ports": "19000-21000"}, "error pools.ports", "takes 10002-19999"),
        ("cluster_name", "c", {"pools.ports": "20000-20005"}, "error pools.ports", "listen on 7 ports"),
        # Rules of the security group.
        (RULES, [], {}, f"warning {RULES}", "router.port 7421"),
        (RULES,
         [{"IpProtocol": "tcp", "FromPort": 7421, "ToPort": 7421, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}], {},
         f"warning {RULES}", "0.0.0.0/0"),
        (RULES,
         [{"IpProtocol": "tcp", "FromPort": 6379, "ToPort": 7421, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}], {},
         f"error {RULES}", "run code"),
        (RULES,
         [{"IpProtocol": "tcp", "FromPort": 7421, "ToPort": 7422, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
         {"router.admin_host": "10.0.0.7"}, f"error {RULES}", "can stop the service with an operator's key"),
        (RULES,
         [{"IpProtocol": "tcp", "FromPort": 7421, "ToPort": 7422, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}], {},
         f"warning {RULES}", "0.0.0.0/0"),
        (RULES,
         [{"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
         {"gateway.host": "0.0.0.0"}, f"warning {RULES}", "0.0.0.0/0"),
        (RULES,
         [{"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}], {},
         f"warning {RULES}", "router.port 7421"),
        (RULES, [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}], {},
         f"warning {RULES}", "10.0.0.0/8"),
    ],
)  # fmt: skip
def test_service_that_does_not_fit_is_told(
    key: str, value: Any, flags: dict[str, Any], expected: str, words: str
) -> None:
    told = problems(put(shipped("aws"), key, value), service("gpu", **flags))
    assert expected in told, told
    assert words in told[expected]


@pytest.mark.parametrize("name", ["aws", "gcp"])
@pytest.mark.parametrize(
    ("prefill", "decode", "most"), [(1, 1, 8), (2, 3, 8), (4, 4, 8), (2, 5, 8), (6, 1, 8), (3, 3, 5)]
)
def test_layout_has_the_nodes_that_rays_own_autoscaler_would_start(
    name: str, prefill: int, decode: int, most: int
) -> None:
    tree = put(shipped(name), "max_workers", most)
    config = service("gpu", **{"pools.prefill.workers": prefill, "pools.decode.workers": decode})
    layout = lay_out(cluster_file.parse(tree), config.pools)
    nodes = Counter(node.node_type.name for node in layout.nodes if not node.node_type.is_head)
    demands = [(needs_of(pool), pool.workers) for _, pool in named_pools(config.pools)]
    assert rays_autoscaler(tree, demands) == (nodes, sum(layout.homeless.values()))


def rays_autoscaler(tree: dict[str, Any], demands: list[tuple[dict[str, float], int]]) -> tuple[dict[str, int], int]:
    """Nodes of each type that it starts for these workers in an empty cluster, and workers that find no room."""
    autoscaling = AutoscalingConfig(tree, skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        # Ray counts the head, which is not among the nodes that it starts here.
        max_num_nodes=autoscaling.get_max_num_nodes() - 1,
        resource_requests=[
            ResourceRequestByCount(request=ResourceRequestUtil.make(needs), count=count) for needs, count in demands
        ],
    )
    reply = ResourceDemandScheduler(None).schedule(request)
    return {launch.instance_type: launch.count for launch in reply.to_launch}, len(reply.infeasible_resource_requests)


def test_head_with_room_takes_workers_of_a_pool_that_names_no_nodes() -> None:
    tree = put(shipped("aws"), "available_node_types.head.resources", {"CPU": 8})
    config = service("cpu", **{"pools.prefill.node_resource": None, "pools.decode.workers": 1})
    layout = lay_out(cluster_file.parse(tree), config.pools)
    assert layout.homeless["prefill"] == 0
    assert {node.node_type.name: dict(node.workers) for node in layout.nodes if node.node_type.is_head} == {
        "head": {"prefill": 1}
    }


def test_packed_pool_fills_a_node_before_the_next_and_a_spread_one_does_not() -> None:
    tree = shipped("aws")
    for pool in ("prefill", "decode"):
        tree["available_node_types"][pool]["resources"] = {"CPU": 16, "GPU": 2, f"rachis_{pool}": 2}
    config = service("gpu", **{"pools.prefill.placement_strategy": "PACK"})
    plans = {one.node_type.name: one for one in cluster_plan.plan(cluster_file.parse(tree), config, 0)}
    assert plans["prefill"].workers == ((1, {"prefill": 2}),)
    assert plans["decode"].workers == ((2, {"decode": 1}),)
    gib = 1 << 30
    assert plans["prefill"].memory_bytes == 2 * (4 + 8) * gib
    assert plans["head"].memory_bytes == 0


def test_commands_of_a_node_type_replace_the_common_ones() -> None:
    tree = put(shipped("gcp"), "available_node_types.decode.worker_setup_commands", ["true"])
    commands = {node_type.name: node_type.setup_commands for node_type in cluster_file.parse(tree).node_types}
    assert commands["decode"] == ("true",)
    assert "make -C ~/rachis setup PROFILE=gpu VENV=$HOME/rachis-venv" in commands["prefill"]


def test_memory_that_the_file_names_is_compared_with_the_estimate() -> None:
    tree = put(shipped("aws"), "available_node_types.decode.resources.memory", 8 << 30)
    plans = cluster_plan.plan(cluster_file.parse(tree), service("gpu"), 0)
    assert [finding.key for finding in cluster_plan.check_memory(plans)] == [
        "available_node_types.decode.resources.memory"
    ]


def test_hosts_of_ones_own_are_placed_by_metadata_or_by_a_plain_start_command() -> None:
    tree = put(
        shipped("onprem"), "provider", {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]}
    )
    by_metadata = tree | {
        "metadata": {
            "hosts": {"10.0.0.2": {"CPU": 16, "rachis_prefill": 2}, "10.0.0.3": {"CPU": 16, "rachis_decode": 2}}
        }
    }
    assert problems(by_metadata, service("cpu")) == {}
    assert "warning metadata.hosts" in problems(tree, service("cpu"))
    start = """RAY_AUTH_MODE=token ray start --num-cpus=16 --resources='{"rachis_prefill": 1, "rachis_decode": 1}'"""
    plain = tree | {"worker_start_ray_commands": [start]}
    assert problems(plain, service("cpu")) == {}
    (hosts,) = [node_type for node_type in cluster_file.parse(plain).node_types if not node_type.is_head]
    assert (hosts.name, hosts.least, hosts.most) == ("10.0.0.2, 10.0.0.3", 2, 2)


def test_mounts_that_are_not_here_are_told() -> None:
    (finding,) = [one for one in cluster_check.check_file(parsed(), ["."]) if one.level == "error"]
    assert finding.key == "file_mounts.~/rachis"


@pytest.mark.parametrize(
    ("text", "words"), [("- a", "must be a table"), ("a: [", "not valid YAML"), (None, "cannot be read")]
)
def test_file_that_is_none_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        cluster_file.read(path)


def test_command_prints_what_each_node_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # Whose Ray has made a token, as `ray get-auth-token --generate` does.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    given = [
        "cluster",
        "check",
        "cluster_configs/ray/aws.yaml",
        "--profile",
        "gpu-pools",
        "--config",
        "cluster_configs/service/gpu.yaml",
    ]
    shown = rachis(*given)
    assert shown.exit_code == 0, shown.output
    order = [
        "head: the head",
        "~/rachis <- .",
        "make -C ~/rachis setup",
        "ray start --head",
        "1 prefill on each of 2 nodes",
    ]
    positions = [shown.output.index(words) for words in order]
    assert positions == sorted(positions)
    assert "Ray takes it, and the service fits" in shown.output
    result = json.loads(rachis(*given, "--json").output.splitlines()[-1])
    assert result["works"]
    assert [(node["name"], node["nodes"], node["most_nodes"]) for node in result["nodes"]] == [
        ("head", 1, 1), ("prefill", 2, 4), ("decode", 2, 4)
    ]  # fmt: skip


def test_command_exits_2_with_a_sentence_when_it_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(put(shipped("aws"), "max_worker", 3)))
    shown = rachis("cluster", "check", path)
    assert shown.exit_code == 2
    assert "error max_worker: Ray knows no such key; did you mean `max_workers`?" in shown.output
