"""The options of `rachis bench encryption`; encryption_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("encryption")(encryption_command)


def encryption_command(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Turns of each router.")] = 20,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Of each turn.")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at once.")] = 8,
    steps: Annotated[float, typer.Option(min=1, max=10_000, help="Steps of the engine in a second.")] = 100.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Of each request.")] = 600,
    new_tokens: Annotated[int, typer.Option(min=1, max=10_000, help="Of each answer.")] = 16,
    as_json: options.AsJson = False,
) -> None:
    """What it costs in latency and in CPU that calls between routers and workers are encrypted."""
    from benchmarks.encryption import Wish
    from command_line.bench import encryption_run

    wish = Wish(rounds, requests, concurrency, steps, prompt_tokens, new_tokens)
    asyncio.run(encryption_run.bench_encryption(wish, as_json=as_json))
