"""The options of `rachis profile`; profile_run.py does the work."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(app: typer.Typer) -> None:
    app.command("profile")(profile_command)


def profile_command(
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("rachis-cost-profile.json"),
    plot: Annotated[Path | None, typer.Option(help="Where the picture goes; default is beside the figures.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each size.")] = 5,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what recomputing and what swapping costs here, for cost-based preemption; under five minutes."""
    from command_line import profile_run

    loaded = options.load_config(profile, config, assignments, model)
    asyncio.run(profile_run.profile(loaded, output.absolute(), plot, repetitions, as_json=as_json))
