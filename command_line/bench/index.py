"""The options of `rachis bench index`; index_run.py does the work."""

from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("index")(index_command)


def index_command(
    blocks: Annotated[int, typer.Option(min=200_000, max=100_000_000, help="Entries of the index.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="That hold them.")] = 64,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also with fewer entries and with more workers.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Time of a placement decision for 32k tokens, block events a second, and memory, of a router with a full index."""
    from command_line.bench import index_run

    index_run.bench_index(blocks, workers, seed, sweep=sweep, as_json=as_json)
