"""The options of `rachis bench tiers`; tiers_run.py does the work."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("tiers")(tiers_command)


def tiers_command(
    shape: Annotated[str, typer.Option(help="Prompts like those of mmlu, hellaswag, bbh or ceval.")] = "mmlu",
    requests: Annotated[int, typer.Option(min=2, max=10_000, help="Of each variant, in each round.")] = 400,
    noise_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the requests, have a prompt that nobody else has.")
    ] = 0.2,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests in the engine at any time.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of all variants, in turns; times are medians.")] = 3,
    device_blocks: Annotated[
        int | None, typer.Option(min=8, max=16_384, help="Default is 1/2.5 of the blocks that prompts share.")
    ] = None,
    host_ratio: Annotated[
        float, typer.Option(min=0.0, max=64.0, help="Host memory as a multiple of the device's blocks.")
    ] = 1.0,
    host_gib: Annotated[float | None, typer.Option(min=0.0, max=64.0, help="Instead of the multiple.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the share of requests over TTFT.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """TTFT and tokens computed with tiers of cached prefixes, against plain vLLM and against copying every block."""
    from command_line.bench import tiers_run

    host = {"tiers.host_ratio": host_ratio if host_gib is None else None}
    if host_gib is not None:
        host["tiers.host_gib"] = host_gib
    loaded = options.load_config(profile, config, assignments, model, host)
    given = tiers_run.Options(shape, requests, noise_share, concurrency, rounds, device_blocks, plot, seed)
    asyncio.run(tiers_run.bench_tiers(loaded, given, as_json=as_json))
