"""The options of `rachis verify`; verify_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(app: typer.Typer) -> None:
    app.command("verify")(verify_command)


def verify_command(
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256)] = 4,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare the cluster's tokens with those of one plain vLLM."""
    from command_line import verify_run

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    compared = verify_run.verify(
        loaded, options.state_file(), address, prompts, seed=seed, concurrency=concurrency, as_json=as_json
    )
    raise typer.Exit(asyncio.run(compared))
