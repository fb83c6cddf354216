"""The command line as a user would call it, in this process."""

from functools import cache
from typing import Any

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
