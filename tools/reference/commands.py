"""`docs/reference/commands.md`: every command with its options, from the tree of commands."""

from collections.abc import Iterator
from typing import Any

import typer

from command_line.main import app
from tools.reference.table import WRITTEN, code, prose, table

_INTRODUCTION = """\
Every command takes `--help`. With `--json` the last line of standard output is one JSON object. A command exits with
2 for input that is wrong, and with 1 for what happened to the cluster ([errors](../using.md#errors)).
"""
_TYPES = {
    "bool": "on or off",
    "str": "text",
    "int": "whole number",
    "float": "number",
    "Path": "file or folder",
    "list[str]": "text, may be given again",
    "list[Path]": "file or folder, may be given again",
    "list[float]": "number, may be given again",
    "list[int]": "whole number, may be given again",
}


def page() -> str:
    parts = ["# Commands\n", WRITTEN.format(source="[command_line](../../command_line)"), _INTRODUCTION]
    for name, command in tree():
        said = (command.help or "").strip()
        parts.append(f"## {name}\n")
        parts += [f"{prose(said)}\n"] if said else []
        rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        parts += [table(("option", "type", "default", "what"), rows)] if rows else []
    return "\n".join(parts)


def tree() -> Iterator[tuple[str, Any]]:
    """Every command by its whole name, groups before their commands."""
    return _below("rachis", typer.main.get_command(app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from _below(f"{name} {each}", below)


def _row(parameter: Any) -> tuple[str, str, str, str]:
    if parameter.param_type_name == "argument":
        names = code(parameter.name.upper())
    else:
        names = ", ".join(code(option) for option in (*parameter.opts, *parameter.secondary_opts))
    return names, _type(parameter), _default(parameter), prose(parameter.help or "")


def _default(parameter: Any) -> str:
    given = parameter.default
    if parameter.required:
        return "required"
    if isinstance(given, bool):
        return "on" if given else "off"
    return "" if given is None or given == "" else code(str(given))


def _type(parameter: Any) -> str:
    bare = parameter.bare_type()
    named = _TYPES.get(bare, bare)
    least, most = parameter.min, parameter.max
    if least is not None and most is not None:
        return f"{named}, {least:g} to {most:g}"
    if least is not None:
        return f"{named}, at least {least:g}"
    return named if most is None else f"{named}, at most {most:g}"
