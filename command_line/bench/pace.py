"""The options of `rachis bench pace`; pace_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options

_PROFILE = "imitated-8"


def register(bench: typer.Typer) -> None:
    bench.command("pace")(pace_command)


def pace_command(
    streams: Annotated[int, typer.Option(min=1, max=4096, help="Answers at once.")] = 512,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="That are measured, once all have begun.")] = 20.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Of each, all different.")] = 500,
    max_tokens: Annotated[int, typer.Option(min=16, help="Of each answer: more than come in the time.")] = 20_000,
    profile: options.Profile = _PROFILE,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    as_json: options.AsJson = False,
) -> None:
    """Whether imitated GPUs keep their cost model's time between tokens on this machine, on an own service."""
    from benchmarks.pace import Streams
    from command_line.bench import pace_run

    loaded = options.load_config(profile, config, assignments, None)
    asked = Streams("", streams, prompt_tokens, max_tokens, seconds)
    asyncio.run(pace_run.bench_pace(loaded, options.state_file(), asked, as_json=as_json))
