"""The command line as a user would call it, in this process."""

from functools import cache
from inspect import iscoroutinefunction
from typing import Any

import pytest
import typer
from click.testing import CliRunner, Result

from command_line.main import app


def rachis(*arguments: object) -> Result:
    """What `rachis` with these arguments printed, and how it ended."""
    return CliRunner().invoke(command_tree(), [str(each) for each in arguments])


@cache
def command_tree() -> Any:
    """Built of 150 declarations, which takes as long as many a test. Typer has a click of its own."""
    return typer.main.get_command(app)


def handed_over(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int = 0) -> list[tuple[Any, ...]]:
    """What commands hand to the function that does their work, by call: its arguments, and the named ones last.

    It does not run. code: what it returns.
    """
    calls: list[tuple[Any, ...]] = []

    def noted(*arguments: Any, **named: Any) -> int:
        calls.append((*arguments, named))
        return code

    async def noted_when_awaited(*arguments: Any, **named: Any) -> int:
        return noted(*arguments, **named)

    # Typer calls a command, with the options of the command line for parameters: a test has no say in it.
    monkeypatch.setattr(owner, name, noted_when_awaited if iscoroutinefunction(getattr(owner, name)) else noted)
    return calls
