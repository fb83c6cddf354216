"""The options of `rachis bench telemetry`; telemetry_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("telemetry")(telemetry_command)


def telemetry_command(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Turns of each router.")] = 20,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Of each turn.")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at once.")] = 8,
    steps: Annotated[float, typer.Option(min=1, max=10_000, help="Steps of the engine in a second.")] = 100.0,
    sample_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of the traces that is exported.")] = 0.01,
    as_json: options.AsJson = False,
) -> None:
    """What exported traces and logs in JSON cost, in latency and in the router's CPU."""
    from command_line.bench import telemetry_run

    asyncio.run(telemetry_run.bench_telemetry(rounds, requests, concurrency, steps, sample_rate, as_json=as_json))
