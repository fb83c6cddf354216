"""The options of `rachis bench gateway`; gateway_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("gateway")(gateway_command)


def gateway_command(
    requests: Annotated[int, typer.Option(min=16, help="Over HTTP and over gRPC each, at each concurrency.")] = 160,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Latency and CPU that HTTP adds to gRPC, by one gateway process and by two."""
    from command_line.bench import gateway_run

    loaded = options.load_config(profile, config, assignments, model)
    asyncio.run(gateway_run.bench_gateway(loaded, options.state_file(), requests, as_json=as_json))
