"""The options of `rachis bench hostile`; hostile_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("hostile")(hostile_command)


def hostile_command(
    seconds: Annotated[float, typer.Option(min=5, max=3600, help="How long one client does its worst.")] = 60.0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """What one client that does its worst costs the others, on an own service."""
    from command_line.bench import hostile_run

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    asyncio.run(hostile_run.bench_hostile(loaded, options.state_file(), seconds, as_json=as_json))
