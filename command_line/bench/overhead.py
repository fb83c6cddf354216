"""The options of `rachis bench overhead`; overhead_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("overhead")(overhead_command)


def overhead_command(
    requests: Annotated[int, typer.Option(min=20, help="Requests of each kind at each concurrency.")] = 200,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Latency and CPU that router and hand-off add over the same engines called directly."""
    from command_line.bench import overhead_run

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    asyncio.run(overhead_run.bench_overhead(loaded, options.state_file(), requests, as_json=as_json))
