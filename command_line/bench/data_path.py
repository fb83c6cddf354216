"""The options of `rachis bench data-path`; data_path_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("data-path")(data_path_command)


def data_path_command(
    streams: Annotated[int, typer.Option(min=1, max=4096, help="Answers at once.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="That each load is measured.")] = 10.0,
    steps: Annotated[str, typer.Option(help="Steps of the engine in a second, comma-separated.")] = "10,30,100",
    as_json: options.AsJson = False,
) -> None:
    """CPU that a token costs worker and router, on a worker that computes nothing."""
    from command_line.bench import data_path_run

    asyncio.run(data_path_run.bench_data_path(streams, seconds, data_path_run.rates_of(steps), as_json=as_json))
