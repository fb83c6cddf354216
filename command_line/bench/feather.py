"""The options of `rachis bench feather`; feather_run.py does the work."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("feather")(feather_command)


def feather_command(
    groups: Annotated[int, typer.Option(min=0, max=1000, help="Prefixes; 0: nobody shares anything.")] = 5,
    shared_tokens: Annotated[int, typer.Option(min=1, max=131_072, help="Of each prefix.")] = 3500,
    levels: Annotated[int, typer.Option(min=1, max=3, help="Of the tree of prefixes.")] = 1,
    suffix_tokens: Annotated[int, typer.Option(min=1, max=8192, help="Of each prompt alone.")] = 24,
    decode_tokens: Annotated[int, typer.Option(min=2, max=8192, help="Generated for each request.")] = 64,
    rate: Annotated[float, typer.Option(min=0.01, max=10_000, help="Arrivals a second, Poisson.")] = 40.0,
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="Of each run.")] = 10.0,
    places: Annotated[int, typer.Option(min=1, max=1024, help="Requests that run at once at most.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of all policies, in turns; figures are medians.")] = 3,
    policy: Annotated[
        list[str] | None, typer.Option(help="greedy, heuristic, bandit or q_learning; several may be given.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="groups, shared, decode, rate or levels besides; several may be given.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of batch size and throughput over time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts and arrivals.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Throughput, time between tokens and waits with each policy of the decode scheduler, against order of arrival."""
    from benchmarks.feather.workload import FeatherWorkload
    from command_line.bench import feather_run

    loaded = options.load_config(profile, config, assignments, model)
    workload = FeatherWorkload(groups, shared_tokens, levels, suffix_tokens, decode_tokens, rate, seconds, seed)
    given = feather_run.Options(workload, places, rounds, policy or feather_run.POLICIES, sweep or (), plot)
    asyncio.run(feather_run.bench_feather(loaded, given, as_json=as_json))
