"""A cluster file of `ray up`: checked against Ray's own schema and rules, and filled out as Ray would.

The only module that imports Ray's autoscaler. No cloud's SDK is needed, and nothing is asked over the network: what a
cloud alone knows (images, quotas, instance types) is not checked. `faults` comes first; `parse` takes a tree without.
"""

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any

import click
import jsonschema
import yaml

from cluster_configs.yaml_complaint import yaml_complaint
from cluster_core.errors import ConfigError
from control_plane.ray_cluster.nodes import ClusterFile, Finding, NodeType, Opening, error

# Stands in the shipped files where only the site knows the value.
PLACEHOLDER = "CHANGE-ME"
_COMMAND_KEYS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands",
)  # fmt: skip
# What `ray start` takes where its command does not say; a name of ours, the option, first and last port.
_RAY_PORTS = (
    ("Ray's control service", "--port", 6379, 6379),
    ("Ray's client server", "--ray-client-server-port", 10001, 10001),
    ("Ray's object manager", "--object-manager-port", None, None),
    ("Ray's node manager", "--node-manager-port", None, None),
    ("Ray's dashboard", "--dashboard-port", 8265, 8265),
)
_MOST = 10**18
_HALF = "half a surrogate pair, which is no Unicode"
_RAY_WORKER_PORTS = (10002, 19999)
_ALL_PORTS = (0, 65_535)
# A rule of a security group: Ray's schema says nothing of it, and Ray hands it to AWS as it is.
_RULE = {
    "type": "object",
    "properties": {
        "FromPort": {"type": "integer"},
        "ToPort": {"type": "integer"},
        "IpRanges": {"type": "array", "items": {"type": "object", "properties": {"CidrIp": {"type": "string"}}}},
        "Ipv6Ranges": {"type": "array", "items": {"type": "object", "properties": {"CidrIpv6": {"type": "string"}}}},
    },
}

# `metadata.hosts`, which says what each of one's own hosts has.
_HOSTS = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": 0}},
}


def read(path: Path) -> dict[str, Any]:
    """The tree of a file. Raises ConfigError when it cannot be read or is no table."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as fault:
        raise ConfigError(f"cannot be read: {fault}", field=str(path)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        raise ConfigError(yaml_complaint(fault), field=str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError("must be a table, as Ray's cluster files are", field=str(path))
    return tree


def faults(tree: Mapping[str, Any]) -> list[Finding]:
    """Why `ray up` would refuse the file; empty when it would not. One finding for each fault of the schema."""
    found = list(_unjudged(tree))
    if found:
        return found
    validator = jsonschema.Draft7Validator(_schema(tree))
    found = [finding for fault in validator.iter_errors(_with_resources(tree)) for finding in _told(fault)]
    if found:
        return found
    try:
        _prepared(tree, validate=True)
    except (ValueError, TypeError, KeyError, RuntimeError, AssertionError, click.ClickException) as fault:
        return [error("", f"Ray refuses the file: {_ANSI.sub('', str(fault))}")]
    return []


def parse(tree: Mapping[str, Any]) -> ClusterFile:
    """What the file says, with Ray's defaults. The tree has no `faults`."""
    filled = _prepared(tree, validate=False)
    provider = filled["provider"]
    local = provider["type"] == "local"
    return ClusterFile(
        name=filled["cluster_name"],
        provider=provider["type"],
        most_nodes=filled["max_workers"],
        idle_timeout_minutes=float(filled["idle_timeout_minutes"]),
        node_types=tuple(_local_nodes(filled) if local else _cloud_nodes(filled)),
        mounts=tuple((remote, str(source)) for remote, source in filled["file_mounts"].items()),
        excludes=tuple(map(str, filled["rsync_exclude"])),
        openings=tuple(_openings(provider)) if provider["type"] == "aws" else None,
        ray_ports=_ray_ports(" ".join(filled["head_start_ray_commands"])),
        defaulted=tuple(key for key in _COMMAND_KEYS if key not in tree and filled[key] and not local),
        placeholders=tuple(_placeholders(tree)),
    )


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _unjudged(tree: Any, key: str = "", within: tuple[int, ...] = ()) -> Iterator[Finding]:
    """What YAML can say, and no schema can judge."""
    if id(tree) in within:
        yield error(key, "contains itself")
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            below = f"{key}.{name}".lstrip(".")
            if not isinstance(name, str):
                yield error(below, "is a key that is no text; put it in quotes")
            elif not _is_unicode(name):
                yield error(key, f"has a key with {_HALF}")
            else:
                yield from _unjudged(value, below, (*within, id(tree)))
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from _unjudged(value, f"{key}[{position}]", (*within, id(tree)))
    elif isinstance(tree, int | float) and not -_MOST <= tree <= _MOST:
        yield error(key, "must be a number, and none of more than 18 digits")
    elif isinstance(tree, str) and not _is_unicode(tree):
        yield error(key, f"has {_HALF}")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _schema(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Ray's own, and what Ray does not look at and is read here."""
    schema: dict[str, Any] = json.loads((resources.files("ray.autoscaler") / "ray-schema.json").read_text())
    if _is_on_aws(tree):
        group = schema["properties"]["provider"]["properties"]["security_group"]
        group["properties"]["IpPermissions"]["items"] = _RULE
    schema["properties"]["file_mounts"]["additionalProperties"] = {"type": "string"}
    schema["properties"]["metadata"] = {"type": "object", "properties": {"hosts": _HOSTS}}
    return schema


def _is_on_aws(tree: Mapping[str, Any]) -> bool:
    provider = tree.get("provider")
    return isinstance(provider, dict) and provider.get("type") == "aws"


def _with_resources(tree: Mapping[str, Any]) -> dict[str, Any]:
    """On AWS Ray fills in the resources of an instance type itself, before it validates."""
    filled = copy.deepcopy(dict(tree))
    types = filled.get("available_node_types")
    if _is_on_aws(filled) and isinstance(types, dict):
        for node_type in types.values():
            if isinstance(node_type, dict):
                node_type.setdefault("resources", {})
    return filled


def _told(fault: Any) -> Iterator[Finding]:
    """A fault of the schema as sentences that name the key."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault.absolute_path).lstrip(".")
    match fault.validator:
        case "additionalProperties":
            known = fault.schema.get("properties", {})
            for name in sorted(set(fault.instance) - set(known)):
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                yield error(f"{key}.{name}".lstrip("."), f"Ray knows no such key{hint}")
        case "required":
            for name in fault.validator_value:
                if name not in fault.instance:
                    yield error(f"{key}.{name}".lstrip("."), "is missing")
        case "type":
            yield error(key, f"must be of type {fault.validator_value}, got {fault.instance!r}")
        case _:
            yield error(key, fault.message)


def _prepared(tree: Mapping[str, Any], *, validate: bool) -> dict[str, Any]:
    """As `ray up` prepares it. Raises what Ray raises."""
    from ray.autoscaler._private import util

    logging.getLogger(util.__name__).setLevel(logging.WARNING)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        filled: dict[str, Any] = util.prepare_config(_with_resources(tree))
        if validate:
            util.validate_config(filled)
    return filled


def _cloud_nodes(filled: Mapping[str, Any]) -> Iterator[NodeType]:
    for name, given in filled["available_node_types"].items():
        is_head = name == filled["head_node_type"]
        initialization = given.get("initialization_commands", filled["initialization_commands"])
        # Those of a node type replace the common ones, `setup_commands` among them.
        setup = (
            filled["head_setup_commands"]
            if is_head
            else given.get("worker_setup_commands", filled["worker_setup_commands"])
        )
        config = given["node_config"]
        yield NodeType(
            name=name,
            is_head=is_head,
            # One head; other nodes of its type, which hardly anybody has, are not counted on.
            least=1 if is_head else given["min_workers"],
            most=1 if is_head else given["max_workers"],
            resources={resource: float(amount) for resource, amount in given["resources"].items()} or None,
            instance=str(config.get("InstanceType") or config.get("machineType") or ""),
            setup_commands=(*initialization, *setup),
            start_commands=tuple(filled["head_start_ray_commands" if is_head else "worker_start_ray_commands"]),
        )


def _local_nodes(filled: Mapping[str, Any]) -> Iterator[NodeType]:
    """With provider `local` Ray knows one type of node. What each host has says `metadata.hosts`, which Ray ignores, or
    else the start command, where it gives plain numbers."""
    provider = filled["provider"]
    hosts: Mapping[str, Any] = (filled.get("metadata") or {}).get("hosts") or {}
    for role, addresses in (("head", [provider.get("head_ip", "head")]), ("worker", provider.get("worker_ips", ()))):
        start = tuple(filled[f"{role}_start_ray_commands"])
        alike: dict[str, list[str]] = {}
        for address in map(str, addresses):
            known = hosts.get(address) or _started_with(" ".join(start))
            alike.setdefault(json.dumps(known, sort_keys=True), []).append(address)
        for known, names in alike.items():
            yield NodeType(
                name=", ".join(names),
                is_head=role == "head",
                least=len(names),
                most=len(names),
                resources={name: float(amount) for name, amount in (json.loads(known) or {}).items()} or None,
                instance="",
                setup_commands=(*filled["initialization_commands"], *filled[f"{role}_setup_commands"]),
                start_commands=start,
            )


def _started_with(command: str) -> dict[str, float] | None:
    """Resources that a `ray start` names with plain numbers; None where it names no CPUs."""
    cpus = re.search(r"--num-cpus[= ](\d+)", command)
    if cpus is None:
        return None
    gpus = re.search(r"--num-gpus[= ](\d+)", command)
    custom = re.search(r"--resources[= ]['\"]?(\{[^{}$]*\})", command)
    try:
        named = json.loads(custom[1].replace('\\"', '"')) if custom else {}
    except json.JSONDecodeError:
        named = {}
    return {"CPU": float(cpus[1]), **({"GPU": float(gpus[1])} if gpus else {}), **named}


def _openings(provider: Mapping[str, Any]) -> Iterator[Opening]:
    """Rules of the security group that let somebody in from outside of it."""
    for rule in (provider.get("security_group") or {}).get("IpPermissions") or ():
        sources = [one["CidrIp"] for one in rule.get("IpRanges") or () if "CidrIp" in one]
        sources += [one["CidrIpv6"] for one in rule.get("Ipv6Ranges") or () if "CidrIpv6" in one]
        first, last = int(rule.get("FromPort", 0)), int(rule.get("ToPort", _ALL_PORTS[1]))
        if str(rule.get("IpProtocol", "-1")) == "-1" or first < 0:
            first, last = _ALL_PORTS
        if sources:
            yield Opening(first, last, tuple(sources))


def _ray_ports(command: str) -> dict[str, tuple[int, int]]:
    """Ports that Ray listens on on the head, by what for; those it takes at random are left out."""
    ports = {}
    for name, option, first, last in _RAY_PORTS:
        given = re.search(rf"(?<![\w-]){option}[= ](\d+)", command)
        if given is not None:
            first = last = int(given[1])
        if first is not None and last is not None and not (option == "--dashboard-port" and _no_dashboard(command)):
            ports[name] = (first, last)
    low = re.search(r"--min-worker-port[= ](\d+)", command)
    high = re.search(r"--max-worker-port[= ](\d+)", command)
    default_low, default_high = _RAY_WORKER_PORTS
    ports["Ray's workers"] = (int(low[1]) if low else default_low, int(high[1]) if high else default_high)
    return ports


def _no_dashboard(command: str) -> bool:
    return re.search(r"--include-dashboard[= ](false|False|0)", command) is not None


def _placeholders(tree: Any, key: str = "") -> Iterator[str]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _placeholders(value, f"{key}.{name}".lstrip("."))
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from _placeholders(value, f"{key}[{position}]")
    elif isinstance(tree, str) and PLACEHOLDER in tree:
        yield key
