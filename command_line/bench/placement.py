"""The options of `rachis bench placement`; placement_run.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("placement")(placement_command)


def placement_command(
    trace: Annotated[Path, typer.Option(help="A file of requests: Mooncake's, or sessions; see docs/placement.md.")],
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Simulated prefill workers.")] = 16,
    load: Annotated[
        float, typer.Option(min=0.01, max=1.5, help="Share of the workers' time that `cost_formula` needs.")
    ] = 0.95,
    speed: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="So many times the trace's own, instead of a load.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Only these; may be given more than once.")] = None,
    device_tokens: Annotated[str, typer.Option(help="What fits one worker's device, such as 400k.")] = "400k",
    host_tokens: Annotated[str, typer.Option(help="And its host memory, such as 1M; 0: none.")] = "1M",
    costs: Annotated[Path | None, typer.Option(help="Of prefill: a file by `rachis profile`, or JSON.")] = None,
    event_delay_ms: Annotated[float, typer.Option(min=0, max=1e6, help="Until the index hears of blocks.")] = 100,
    prediction_s: Annotated[
        float, typer.Option(min=0, max=1e6, help="How long placements are predictions, of every policy; 0: never.")
    ] = 5,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many of the trace.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the share of requests over TTFT.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals within a tick, and of ties.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """TTFT, hit ratio and balance of every placement policy on a trace, over simulated prefill workers."""
    from command_line.bench import placement_run

    given = placement_run.Options(
        trace, workers, load, speed, policy or (), device_tokens, host_tokens, costs, event_delay_ms, prediction_s,
        requests, plot, seed,
    )  # fmt: skip
    placement_run.bench_placement(given, as_json=as_json)
