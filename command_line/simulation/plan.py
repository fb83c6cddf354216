"""The options of `rachis plan`; plan_run.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(app: typer.Typer) -> None:
    app.command("plan")(plan_command)


def plan_command(
    trace: Annotated[Path, typer.Option(help="A file of requests: Mooncake's, sessions, or with --azure a table.")],
    slo_ttft_ms: Annotated[float, typer.Option(help="Time to first token that a request has to keep; 0: none.")],
    slo_tpot_ms: Annotated[float, typer.Option(help="Mean time between its tokens, likewise; 0: none.")],
    attainment: Annotated[float, typer.Option(help="Share of all requests that has to keep both.")] = 0.9,
    cost_model: Annotated[str, typer.Option(help="A name of cluster_sim/cost_models, or a JSON file.")] = (
        "h100-llama-3.1-8b"
    ),
    most_gpus: Annotated[int, typer.Option(help="More are not looked at.")] = 64,
    speed: Annotated[float, typer.Option(help="How many times faster than recorded the trace is played.")] = 1.0,
    requests: Annotated[int, typer.Option(help="The first so many; 0: all.")] = 0,
    most_runs: Annotated[int, typer.Option(help="Simulations at most.")] = 60,
    azure: Annotated[bool, typer.Option("--azure", help="The trace is a table of arrivals and lengths.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals within a tick, and of ties.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """The smallest pools that keep the objectives on a trace, and what one worker less would cost; by simulation."""
    from command_line.simulation import plan_run

    given = plan_run.Options(
        trace, slo_ttft_ms, slo_tpot_ms, attainment, cost_model, most_gpus, speed, requests, most_runs, azure, seed
    )
    plan_run.plan_command(given, as_json_text=as_json)
