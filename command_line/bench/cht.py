"""The options of `rachis bench cht`; cht_run.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("cht")(cht_command)


def cht_command(
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Each inserted, found, added, finished.")] = 5000,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of each prompt.")] = 5000,
    groups: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of requests that share a prefix.")] = 5,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=65_536, help="The step in which prefixes are compared.")] = 64,
    finds: Annotated[float, typer.Option(min=1, max=100, help="How often each request is looked for.")] = 5.3,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the costs over waiting requests.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time of each operation of the chunked hash tree, which finds the waiting request that fits the batch best."""
    from benchmarks.cht.workload import ChtWorkload
    from command_line.bench import cht_run

    cht_run.bench_cht(ChtWorkload(requests, tokens, groups, chunk_tokens, finds, seed), plot, as_json=as_json)
