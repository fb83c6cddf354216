"""The options of `rachis bench system`; system_run.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from cluster_core.errors import ConfigError
from command_line import options

_KIND, _COST_MODEL = "conversation", "h100-llama-3.1-8b"
_SLO_TTFT_MS, _SLO_TPOT_MS = 5000.0, 50.0
_TTFT_S, _TPOT_MS = "0.5,1,2,5,10", "15,25,50,100"

Sizes = Annotated[
    str | None, typer.Option(help="Workers in all, with commas.", show_default="4,16,64; of a grid by its effort")
]
Seconds = Annotated[
    float | None,
    typer.Option(min=10, max=1e6, help="Of arrivals; a quarter warms up.", show_default="240; of a grid by its effort"),
]
Seeds = Annotated[
    str | None,
    typer.Option(help="Of a grid, with commas: figures are means.", show_default="0,1,2; with --quick 0"),
]

Rates = Annotated[
    str | None,
    typer.Option(help="Requests a second for each worker, with commas.", show_default="0.75,1,1.25; of a grid more"),
]

Quick = Annotated[
    bool,
    typer.Option("--quick", help="Of a grid: 8 workers, not 4 and 16, and one seed."),
]

Imitated = Annotated[
    bool,
    typer.Option("--imitated", help="Of a grid: three cells on own services over imitated GPUs, beside simulated."),
]

Full = Annotated[bool, typer.Option("--full", help="Of a grid: 4, 16 and 64 workers, 240 s, all rates and splits.")]


def register(bench: typer.Typer) -> None:
    bench.command("system")(system_command)


def system_command(
    trace: Annotated[Path | None, typer.Option(help="A file of requests: Mooncake's, or sessions.")] = None,
    kind: Annotated[str, typer.Option(help="Without a trace: a kind that is drawn; see docs/simulator.md.")] = _KIND,
    cost_model: Annotated[str, typer.Option(help="A name of cluster_sim/cost_models, or a JSON file.")] = _COST_MODEL,
    sizes: Sizes = None,
    rates: Rates = None,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="0: no objective.")] = _SLO_TTFT_MS,
    slo_tpot_ms: Annotated[
        float, typer.Option(min=0, help="Mean time between tokens; 0: no objective.")
    ] = _SLO_TPOT_MS,
    seconds: Seconds = None,
    system: Annotated[list[str] | None, typer.Option(help="Only these; may be given more than once.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, and of ties.")] = 0,
    grid: Annotated[bool, typer.Option("--grid", help="What each set-up carries, over a grid of objectives.")] = False,
    quick: Quick = False,
    full: Full = False,
    imitated: Imitated = False,
    grid_ttft_s: Annotated[str, typer.Option(help="Of a grid, with commas.")] = _TTFT_S,
    grid_tpot_ms: Annotated[str, typer.Option(help="Of a grid, with commas.")] = _TPOT_MS,
    seeds: Seeds = None,
    as_json: options.AsJson = False,
) -> None:
    """Goodput, cost and router cores of the whole system and of what one would run without it, simulated."""
    from command_line.bench import system_grid_run, system_run, system_service_run

    if imitated:
        others = {
            "--quick": quick, "--full": full, "--trace": trace, "--sizes": sizes, "--seeds": seeds, "--system": system,
            "--kind": kind != _KIND, "--cost-model": cost_model != _COST_MODEL,
            "--slo-ttft-ms": slo_ttft_ms != _SLO_TTFT_MS, "--slo-tpot-ms": slo_tpot_ms != _SLO_TPOT_MS,
            "--grid-ttft-s": grid_ttft_s != _TTFT_S, "--grid-tpot-ms": grid_tpot_ms != _TPOT_MS,
        }  # fmt: skip
        for option, is_given in {"--imitated": not grid, **others}.items():
            if is_given:
                said = "is of a grid: give --grid" if option == "--imitated" else "is nothing to imitated cells"
                raise ConfigError(said, field=option)
        system_service_run.bench_system_service(rates, seconds, seed, as_json=as_json)
        return
    if grid:
        if quick and full:
            raise ConfigError("a grid is quick or full", field="--full")
        effort = "quick" if quick else "full" if full else "usual"
        asked = system_grid_run.Options(
            effort, trace, kind, cost_model, sizes, rates, seconds, seeds, grid_ttft_s, grid_tpot_ms
        )
        system_grid_run.bench_system_grid(asked, as_json=as_json)
        return
    given = system_run.Options(
        trace, kind, cost_model, sizes or "4,16,64", rates or "0.75,1,1.25", slo_ttft_ms, slo_tpot_ms,
        seconds or 240.0, system or (), seed,
    )  # fmt: skip
    system_run.bench_system(given, as_json=as_json)
