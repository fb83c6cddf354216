"""`docs/reference/configuration.md`: every key, from the schema."""

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from cluster_configs import schema
from cluster_configs.loading import load, profile_names
from cluster_configs.schema import RachisConfig
from tools.reference.table import WRITTEN, code, prose, table

Node = Mapping[str, Any]

_INTRODUCTION = """\
How a value is set, and which layer wins: [configuration](../using.md#configuration). `rachis config show` prints what
is in force, and where each value comes from. A value outside its limits is refused with a sentence that names the key.
"""
_HEAD = ("key", "type", "limits", "default", "what")
_TYPES = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}


def page() -> str:
    whole = RachisConfig.model_json_schema()
    parts = ["# Configuration\n", WRITTEN.format(source="[schema.py](../../cluster_configs/schema.py)"), _INTRODUCTION]
    alone = []
    for name, node in whole["properties"].items():
        section = _resolved(node, whole)
        if section.get("type") != "object":
            alone.append(_row(name, section))
            continue
        parts += [f"## {name}\n", _statement(section), table(_HEAD, _rows(name, section, whole))]
    parts += ["## Without a section\n", table(_HEAD, alone), *_profiles()]
    return "\n".join(part for part in parts if part)


def _profiles() -> Iterator[str]:
    yield "## What profiles change\n"
    yield "The values of a profile stand in place of the defaults above.\n"
    for name in profile_names():
        yield f"### {name}\n"
        changed = [entry for entry in load(profile=name).entries if entry.source == "profile"]
        yield table(("key", "value"), [(code(entry.key), code(_written(entry.value))) for entry in changed])


def _rows(prefix: str, section: Node, whole: Node) -> Iterator[tuple[str, ...]]:
    for name, node in section["properties"].items():
        below = _resolved(node, whole)
        if below.get("type") == "object":
            yield from _rows(f"{prefix}.{name}", below, whole)
        else:
            yield _row(f"{prefix}.{name}", below)


def _row(key: str, node: Node) -> tuple[str, ...]:
    return (
        code(key),
        _type(node),
        _limits(node),
        code(_written(node.get("default"))),
        prose(node.get("description", "")),
    )


def _resolved(node: Node, whole: Node) -> Node:
    """The section that is referred to, or the node itself."""
    reference = node.get("$ref", "")
    found: Node = whole["$defs"][reference.rpartition("/")[2]] if reference else node
    return found


def _statement(section: Node) -> str:
    documented = inspect.cleandoc(getattr(schema, section["title"]).__doc__ or "")
    return f"{documented}\n" if documented else ""


def _kinds(node: Node) -> list[Node]:
    return list(node.get("anyOf", [node]))


def _type(node: Node) -> str:
    return " or ".join(_one_type(kind) for kind in _kinds(node))


def _one_type(kind: Node) -> str:
    if "enum" in kind:
        return ", ".join(code(_written(value)) for value in kind["enum"])
    if kind["type"] == "array":
        return "list of texts"
    return "`null`" if kind["type"] == "null" else _TYPES[kind["type"]]


def _limits(node: Node) -> str:
    return "; ".join(filter(None, map(_bounds, _kinds(node))))


def _bounds(kind: Node) -> str:
    said = []
    least, most = kind.get("minimum"), kind.get("maximum")
    if least is not None and most is not None:
        said.append(f"{least:,} to {most:,}")
    elif least is not None:
        said.append(f"at least {least:,}")
    if "exclusiveMinimum" in kind:
        said.append(f"above {kind['exclusiveMinimum']:,}")
        said += [f"at most {most:,}"] if most is not None else []
    if "exclusiveMaximum" in kind:
        said.append(f"below {kind['exclusiveMaximum']:,}")
    if "minLength" in kind:
        said.append("not empty")
    if "pattern" in kind:
        said.append(f"matches {code(kind['pattern'])}")
    return ", ".join(said)


def _written(value: Any) -> str:
    """As it would be typed into a YAML file."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) or not value else value
