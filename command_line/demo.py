"""The options of `rachis demo`; demo_run.py and demo_streaming.py do the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command(
    profile: options.Profile = None,
    assignments: options.Assignments = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="A question whose pages are still being retrieved, with and without.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Start a service, answer three recall questions through both pools, stop."""
    from command_line import demo_run, demo_streaming

    loaded = options.load_config(profile, None, assignments, None, options.BOTH_POOLS)
    show = demo_streaming.demo_streaming if streaming else demo_run.demo
    raise typer.Exit(asyncio.run(show(loaded, options.state_file(), as_json=as_json)))
