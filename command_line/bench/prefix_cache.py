"""The options of `rachis bench prefix-cache`; prefix_cache_run.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("prefix-cache")(prefix_cache_command)


def prefix_cache_command(
    trace: Annotated[
        Path | None, typer.Option(help="File in Mooncake's or the session format; see docs/tiers.md.")
    ] = None,
    generated: Annotated[str | None, typer.Option(help="Instead of a file: mmlu, hellaswag, bbh or ceval.")] = None,
    noise_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the generated requests, have a prompt that nobody else has.")
    ] = 0.0,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many only.")] = None,
    device_tokens: Annotated[
        str, typer.Option(help="Room of the first tier, such as 500000, 512k or 2M (powers of ten).")
    ] = "2M",
    host_tokens: Annotated[str, typer.Option(help="Room of the second tier; 0: there is none.")] = "0",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="lru, lfu, fifo, 2q, E, A+P, hotprefix (= E+A+P), rachis, belady; with commas or several "
            "times; default all. lru always runs, to compare with."
        ),
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Device tokens of a curve too, such as 1M,2M,4M.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the curve.")] = None,
    full_blocks_only: Annotated[
        bool, typer.Option("--full-blocks-only", help="No policy caches the partial block at the end of a prompt.")
    ] = False,
    kv_bytes_per_token: Annotated[
        int, typer.Option(min=1, max=2**30, help="For the bytes copied; default is that of Llama-3.1-8B in bf16.")
    ] = 131_072,
    seed: Annotated[int, typer.Option(min=0, help="Of what is generated, and of when sessions start.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Hit ratio and bytes copied by policy of the prefix cache, over a trace.

    Replays it through the classes that run in a worker, once for each policy and capacity. That takes minutes for ten
    thousand requests, and hours for the session trace with its 61 million block references: see --requests. Files are
    read as they are replayed; only belady holds all of it in memory, 8 bytes for each block reference.
    """
    from command_line.bench import prefix_cache_run

    given = prefix_cache_run.Options(
        trace, generated, noise_share, requests, device_tokens, host_tokens, capacities, policy or [],
        full_blocks_only, kv_bytes_per_token, plot, seed,
    )  # fmt: skip
    prefix_cache_run.bench_prefix_cache(given, as_json=as_json)
