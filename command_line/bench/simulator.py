"""The options of `rachis bench simulator`; simulator_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("simulator")(simulator_command)


def simulator_command(
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Of each workload; the median counts.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """What the simulator predicts of a real cluster on this machine, beside what that does. Wants a quiet machine."""
    from command_line.bench import simulator_run

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    asyncio.run(simulator_run.bench_simulator(loaded, options.state_file(), rounds, seed, as_json=as_json))
