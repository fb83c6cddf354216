"""The options of `rachis bench migration`; migration_run.py does the work."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from command_line import options

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig


def register(bench: typer.Typer) -> None:
    bench.command("migration")(migration_command)


def migration_command(
    pairs: Annotated[int, typer.Option(min=4, max=100_000, help="Pairs of requests without faults.")] = 400,
    kills: Annotated[int, typer.Option(min=1, max=1000, help="Decode workers killed, one after the other.")] = 6,
    drain_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="Length of the answers under a drain.")] = 2000,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """How long answers pause that go on elsewhere, and what that costs without faults, on an own service."""
    from benchmarks.migration import Size
    from command_line.bench import migration_run
    from command_line.own_cluster import TWO_OF_EACH, Places

    def load(places: Places) -> "LoadedConfig":
        own = {**TWO_OF_EACH, "service.name": "migration", **places}
        return options.load_config(profile, config, assignments, model, own)

    size = Size(pairs, kills, drain_tokens)
    raise typer.Exit(asyncio.run(migration_run.bench_migration(load, size, as_json=as_json)))
