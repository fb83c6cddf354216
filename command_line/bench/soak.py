"""The options of `rachis bench soak`; soak_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("soak")(soak_command)


def soak_command(
    requests: Annotated[int, typer.Option(min=100, max=10_000_000, help="Short requests.")] = 20_000,
    sessions: Annotated[int, typer.Option(min=10, max=1_000_000, help="Streaming sessions among them.")] = 2_000,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """What an own service holds on to after many requests: memory, file descriptors, threads, tasks."""
    from command_line.bench import soak_run

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    asyncio.run(soak_run.bench_soak(loaded, options.state_file(), requests, sessions, as_json=as_json))
