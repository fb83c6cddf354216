"""The options of `rachis chaos`; chaos_run.py does the work."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from command_line import options

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig


def register(app: typer.Typer) -> None:
    app.command("chaos")(chaos_command)


def chaos_command(
    minutes: Annotated[float, typer.Option(min=1.5, max=1440, help="How long faults and requests go on.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other faults and other prompts.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Stop, freeze and kill parts of an own service while requests run, and count what became of them."""
    from command_line import chaos_run
    from command_line.own_cluster import TWO_OF_EACH, Places

    def load(places: Places) -> "LoadedConfig":
        own = {**TWO_OF_EACH, "service.name": "chaos", **places}
        return options.load_config(profile, config, assignments, model, own)

    raise typer.Exit(asyncio.run(chaos_run.chaos(load, minutes, seed, as_json=as_json)))
