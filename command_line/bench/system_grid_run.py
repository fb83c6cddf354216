"""`rachis bench system --grid`: what pools, shared workers and the hybrid carry, over a grid of objectives."""

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.system_grid import EFFORTS, HYBRID, PUBLISHED, GridStudy, measure
from cluster_core.bound_child import bind_to_parent
from command_line.bench.system_run import MOST_WORKERS, numbers_of
from command_line.output import out, print_json, print_table
from command_line.progress import quiet_progress


@dataclass(frozen=True, slots=True)
class Options:
    """As given; texts hold numbers with commas. None: as the effort has it, a name of `EFFORTS`."""

    effort: str
    trace: Path | None
    # Of workload; without a trace also one that is drawn here.
    kind: str
    cost_model: str
    sizes: str | None
    rates: str | None
    seconds: float | None
    seeds: str | None
    ttft_s: str
    tpot_ms: str


def study_of(options: Options) -> GridStudy:
    """Raises ConfigError naming the option."""
    given: dict[str, Any] = {}
    if options.sizes is not None:
        given["sizes"] = tuple(int(each) for each in numbers_of(options.sizes, "--sizes", 2, MOST_WORKERS))
    if options.rates is not None:
        given["rates"] = tuple(sorted(set(numbers_of(options.rates, "--rates", 1e-6, 1e6))))
    if options.seconds is not None:
        given["seconds"] = options.seconds
    if options.seeds is not None:
        given["seeds"] = tuple(int(each) for each in numbers_of(options.seeds, "--seeds", 0, 1 << 31))
    return GridStudy(
        kind="trace" if options.trace and options.kind != "azure" else options.kind,
        file=options.trace,
        cost_model=options.cost_model,
        ttft_s=tuple(numbers_of(options.ttft_s, "--grid-ttft-s", 1e-3, 1e4)),
        tpot_ms=tuple(numbers_of(options.tpot_ms, "--grid-tpot-ms", 1e-3, 1e6)),
        goes_on=options.rates is None,
        **{**EFFORTS[options.effort], **given},
    )


def _ends_with_its_parent() -> None:
    """However that ends: a run takes minutes. Ctrl-C is for the parent, each of these would take it for the end of one
    run."""
    bind_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def bench_system_grid(options: Options, *, as_json: bool) -> None:
    """On all cores. Raises ConfigError naming the option."""
    study = study_of(options)
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn()
    with (
        quiet_progress(*columns, hidden=as_json) as progress,
        # Each process imports for itself: the thread of a progress bar does not go through a fork.
        ProcessPoolExecutor(
            mp_context=multiprocessing.get_context("spawn"), initializer=_ends_with_its_parent
        ) as processes,
    ):
        task = progress.add_task("", total=study.steps)
        try:
            result = measure(
                study, lambda text: progress.update(task, description=text, advance=1), mapped=processes.map
            )
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    if as_json:
        print_json(result)
        return
    for size in study.sizes:
        _print(study, size, [cell for cell in result["cells"] if cell["workers"] == size])
    out.print(
        f"hybrid over the best other for each cell: worst {_number(result['worst_ratio'])}, mean "
        f"{_number(result['mean_ratio'])}, worst of the core {_number(result['core_ratio'])}; "
        f"{result['lost_cells']} of {len(result['cells'])} cells lost\n"
        "for longer: the share that keeps both at the capacities of the best other and the hybrid, in twice the time"
    )


def _print(study: GridStudy, size: int, cells: list[dict[str, Any]]) -> None:
    rows = [
        (
            f"{cell['ttft_s']:g} s", f"{cell['tpot_ms']:g} ms",
            *(f"{cell['capacity'][name]:.2f}" for name in (*study.others, *PUBLISHED, HYBRID)), _number(cell["ratio"]),
            _number(cell["tpot_p99_over_objective"]), _number(cell["beyond"]),
            ", ".join(map(_number, cell["lasting"].values())),
        )
        for cell in cells
    ]  # fmt: skip
    columns = ("TTFT", "TPOT", *study.others, *PUBLISHED, HYBRID, "ratio", "TPOT P99", "at 1.5x load", "for longer")
    print_table(f"{study.trace}, {size} workers: requests/s a worker that keep both objectives", columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
