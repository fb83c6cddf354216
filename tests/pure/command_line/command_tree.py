"""The tree of commands as text: each command with its options, their bounds and their defaults.

`python -m tests.pure.command_line.command_tree` writes `commands.txt` again, on purpose only: a changed line is
a change for everybody who calls the command.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.command import command_tree

FILE = Path(__file__).with_name("commands.txt")


def tree() -> Iterator[tuple[str, Any]]:
    """Every command by its whole name, groups before their commands."""
    return _below("rachis", command_tree())


def rendered() -> str:
    return "\n".join(line for name, command in tree() for line in (name, *map(_parameter, command.params))) + "\n"


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from _below(f"{name} {each}", below)


def _parameter(parameter: Any) -> str:
    """The parameter as `--seed: int, 0 to any = 0`; an argument by its name in the usage line."""
    is_argument = parameter.param_type_name == "argument"
    names = parameter.name.upper() if is_argument else " ".join([*parameter.opts, *parameter.secondary_opts])
    least, most = parameter.min, parameter.max
    bounds = "" if least is None and most is None else f", {_or_any(least)} to {_or_any(most)}"
    default = " required" if parameter.required else f" = {parameter.default!s}"
    return f"    {names}: {parameter.bare_type()}{bounds}{default}"


def _or_any(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:g}"


if __name__ == "__main__":
    FILE.write_text(rendered())
