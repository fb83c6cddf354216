"""`rachis cluster check` of files that hold what nobody meant: a sentence that names the key, and never a traceback."""

import copy
import datetime
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_configs import loading
from cluster_core.errors import ConfigError
from command_line import cluster_run
from control_plane.ray_cluster import cluster_file
from control_plane.ray_cluster import plan as cluster_plan
from tests.command import rachis
from tests.process.control_plane.ray_cluster.test_cluster_file import (
    RULES,
    SHIPPED,
    found,
    parsed,
    problems,
    put,
    service,
    shipped,
)

HOSTS = {"10.0.0.2": {"CPU": 16, "rachis_prefill": 2}, "10.0.0.3": {"CPU": 16, "rachis_decode": 2}}
RULE = {"IpProtocol": "tcp", "FromPort": 7421, "ToPort": 7421, "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
MEANT_BY_NOBODY: tuple[Any, ...] = (
    None, "x", "", 5, -1, 1.5, True, [], ["x"], [None], [[]], {}, {"a": None}, {1: 2}, "\ud83d", {"\ud83d": 1},
    10**400, math.nan, math.inf, datetime.date(2020, 1, 1), ...,
)  # fmt: skip


def with_hosts() -> dict[str, Any]:
    provider = {"type": "local", "head_ip": "10.0.0.1", "worker_ips": list(HOSTS)}
    return shipped("onprem") | {"provider": provider, "metadata": {"hosts": HOSTS}}


@pytest.mark.parametrize(
    ("name", "key", "value", "expected", "words"),
    [
        ("aws", "provider", "aws", "provider", "must be of type object, got 'aws'"),
        ("aws", RULES, [None], f"{RULES}[0]", "must be of type object"),
        ("aws", RULES, [5], f"{RULES}[0]", "must be of type object"),
        ("aws", RULES, [RULE, []], f"{RULES}[1]", "must be of type object"),
        ("aws", RULES, [RULE | {"FromPort": "x"}], f"{RULES}[0].FromPort", "must be of type integer, got 'x'"),
        ("aws", RULES, [RULE | {"ToPort": None}], f"{RULES}[0].ToPort", "must be of type integer"),
        ("aws", RULES, [RULE | {"IpRanges": 5}], f"{RULES}[0].IpRanges", "must be of type array"),
        ("aws", RULES, [RULE | {"IpRanges": [None]}], f"{RULES}[0].IpRanges[0]", "must be of type object"),
        ("aws", RULES, [{"Ipv6Ranges": [{"CidrIpv6": 5}]}], f"{RULES}[0].Ipv6Ranges[0].CidrIpv6", "of type string"),
        ("onprem", "metadata", {"hosts": 5}, "metadata.hosts", "must be of type"),
        ("onprem", "metadata", {"hosts": {"a": {"CPU": "x"}}}, "metadata.hosts.a.CPU", "must be of type number"),
        ("gcp", "file_mounts", {"~/rachis": 5}, "file_mounts.~/rachis", "must be of type string"),
        ("gcp", "max_workers", 10**19, "max_workers", "none of more than 18 digits"),
        ("gcp", "idle_timeout_minutes", math.nan, "idle_timeout_minutes", "must be a number"),
        ("gcp", "available_node_types.head.resources", {1: 2}, "available_node_types.head.resources.1", "in quotes"),
        ("gcp", "cluster_name", "\ud83d", "cluster_name", "half a surrogate pair"),
    ],
)
def test_what_ray_does_not_look_at_is_told_with_its_key(
    name: str, key: str, value: Any, expected: str, words: str
) -> None:
    told = problems(put(shipped(name), key, value), service("gpu"))
    assert words in told[f"error {expected}"], told


def test_a_file_that_contains_itself_is_told() -> None:
    tree = shipped("aws")
    tree["setup_commands"] = [tree]
    assert problems(tree) == {"error setup_commands[0]": "contains itself"}


def test_the_command_says_it_and_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(put(shipped("aws"), RULES, [None])))
    shown = rachis("cluster", "check", path)
    assert shown.exit_code == 2 and f"error {RULES}[0]: must be of type object, got None" in shown.output


@pytest.mark.parametrize("text", ["a: 2020-13-45", "[" * 3000])
def test_what_yaml_cannot_read_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        cluster_file.read(path)


def test_imitated_workers_take_their_processes_memory_alone() -> None:
    config = loading.load(profile="imitated-8").config
    assert config.tiers.host_gib, "which is not taken"
    assert cluster_plan.worker_memory_bytes(config, weights_bytes=1 << 40) == 1 << 29
    assert all(one.memory_bytes is not None for one in cluster_plan.plan(parsed("aws"), config, 0))


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED])
def test_whatever_stands_in_a_file_is_judged_and_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, rng, config = with_hosts() if name == "onprem" else shipped(name), random.Random(7), service("gpu")
    places = sorted(_places(base), key=str)
    for _ in range(60):
        place, value = rng.choice(places), rng.choice(MEANT_BY_NOBODY)
        tree = _planted(base, place, value)
        # YAML of a file would take as long as all that is tried here, and not keep all of it.
        monkeypatch.setattr(cluster_file, "read", lambda _path, tree=tree: tree)
        works = cluster_run.check(tmp_path, config, as_json=False)
        shown = capsys.readouterr().out
        shown.encode()
        assert works or "error " in shown, (place, value)
        assert all(one.sentence for one in found(tree, None)), (place, value)


def _places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for part, value in inner:
        yield (*above, part)
        yield from _places(value, (*above, part))


def _planted(base: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The tree with another value there; ... takes it out."""
    tree = copy.deepcopy(base)
    inner: Any = tree
    for part in place[:-1]:
        inner = inner[part]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return tree
