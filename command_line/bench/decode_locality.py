"""The options of `rachis bench decode-locality`; decode_locality_run.py does the work."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("decode-locality")(decode_locality_command)


def decode_locality_command(
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("rachis-decode-locality.json"),
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF; default is beside the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, in less than a minute.")] = False,
    batches: Annotated[str | None, typer.Option(help="Requests of a batch, such as 1,4,16.")] = None,
    groups: Annotated[
        str | None, typer.Option(help="Groups that share a prefix; as many as requests are always measured.")
    ] = None,
    shared: Annotated[str | None, typer.Option(help="Tokens that a group shares, such as 512,3500.")] = None,
    suffix: Annotated[str | None, typer.Option(help="Tokens of a request's own, 16 at least.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Visits of each batch at most.")] = 5,
    limit_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="No other round begins that would end later.")
    ] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Decode step time by what a batch shares, for the simulator: grid, series and fitted models in a JSON file."""
    from command_line.bench import decode_locality_run

    loaded = options.load_config(profile, config, assignments, model)
    given = decode_locality_run.Options(output, plot, quick, batches, groups, shared, suffix, rounds, limit_s, seed)
    asyncio.run(decode_locality_run.bench_decode_locality(loaded, given, as_json=as_json))
