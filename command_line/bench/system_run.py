"""`rachis bench system`: the whole system against plain vLLM, a plain proxy and the published formula, simulated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.system import OURS, SYSTEMS, Study, measure
from cluster_core.errors import ConfigError
from command_line.output import out, print_json, print_table
from command_line.progress import quiet_progress

MOST_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """As given."""

    trace: Path | None
    kind: str
    cost_model: str
    # With commas.
    sizes: str
    # With commas.
    rates: str
    ttft_ms: float
    tpot_ms: float
    seconds: float
    systems: Sequence[str]
    seed: int


def bench_system(options: Options, *, as_json: bool) -> None:
    """Raises ConfigError naming the option."""
    sizes = [int(each) for each in numbers_of(options.sizes, "--sizes", 2, MOST_WORKERS)]
    rates = numbers_of(options.rates, "--rates", 1e-6, 1e6)
    systems = list(options.systems or SYSTEMS)
    for name in systems:
        if name not in SYSTEMS:
            raise ConfigError(f"must be of {', '.join(SYSTEMS)}, got {name}", field="--system")
    study = Study(
        "trace" if options.trace else options.kind, options.trace, options.cost_model, tuple(sizes), tuple(rates),
        options.ttft_ms, options.tpot_ms, options.seconds, options.seed,
    )  # fmt: skip
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with quiet_progress(*columns, hidden=as_json) as progress:
        task = progress.add_task("")
        result = measure(study, systems, lambda text: progress.update(task, description=text))
    if as_json:
        print_json(result)
        return
    for size, runs in result["sizes"].items():
        _print(size, runs)
    out.print(
        f"best: goodput at a rate at which {result['slo']['attainment']:.0%} of all requests keep both objectives"
    )


def _print(size: str, runs: dict[str, Any]) -> None:
    ours = runs.get(OURS, {}).get("best_goodput_per_s", 0.0)
    rates = [f"{run['requests_per_s']:g}/s" for run in next(iter(runs.values()))["runs"]]
    rows = []
    for name, each in runs.items():
        best = each["best_goodput_per_s"]
        dollars = each["dollars_per_million_tokens"]
        rows.append(
            (
                name, *(f"{run['attainment']:.1%}" for run in each["runs"]), f"{best:.1f}" if best else "-",
                f"{ours / best:.2f}" if best and ours else "-", f"{dollars:.2f}" if dollars else "-",
                f"{max(run['router_cores'] for run in each['runs']):.3f}",
            )
        )  # fmt: skip
    columns = ("system", *rates, "best", "ours x", "$/M tokens", "router cores")
    print_table(f"{size} workers: requests within the objectives, by rate", columns, rows)


def numbers_of(text: str, option: str, least: float, most: float) -> list[float]:
    """With commas. Raises ConfigError naming option and limits."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"must be numbers with commas, got {text}", field=option) from None
    if not all(least <= each <= most for each in found):
        raise ConfigError(f"must be from {least:g} to {most:g}, got {text}", field=option)
    return found
