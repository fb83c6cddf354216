"""What guides and runbooks tell to type, and whether the command line would take it. Nothing is run."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

from tests.command import command_tree


def commands(text: str) -> list[str]:
    """What is to be typed: the lines of console blocks that begin with a prompt."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines() if "$ " in line[:6]]


def shell_lines(text: str) -> Iterator[str]:
    """Each line of a block without a language that begins with `rachis`, and each command of a console block."""
    for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            typed = line.removeprefix("$ ").removeprefix(".venv/bin/")
            if typed.startswith("rachis "):
                yield typed
    yield from (line.removeprefix(".venv/bin/") for line in commands(text))


def parse(line: str) -> None:
    """Takes a whole command apart as the command line does, and runs nothing. Raises click's errors."""
    name: str | None
    name, *arguments = shlex.split(line, comments=True)
    command: Any = command_tree()
    context = command.make_context(name, arguments)
    while isinstance(command, TyperGroup):
        # click's attribute, by which it takes its own groups apart.
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, arguments, parent=context)
