"""The options of `rachis simulate`; simulate_run.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate_command)


def simulate_command(
    scenario: Annotated[Path, typer.Argument(help="A YAML file; see docs/simulator.md and benchmarks/scenarios/.")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE for all variants, such as pools.decode.workers=8.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF: CCDF of TTFT, throughput, batches, hits.")] = None,
    html: Annotated[Path | None, typer.Option(help="One page with the table, the plots and the scenario.")] = None,
    curves: Annotated[bool, typer.Option("--curves", help="CCDF and series in the JSON as well.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="What the simulation took, in the JSON as well.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """A cluster that does not exist, on requests that nobody sends: the production code over cost models of engines."""
    from command_line.simulation import simulate_run

    given = simulate_run.Options(scenario, change or (), seed, plot, html, curves, timing)
    simulate_run.simulate(given, as_json_text=as_json)
