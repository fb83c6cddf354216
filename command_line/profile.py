"""`rachis profile`: measures recompute and swap on this machine and keeps the figures for `streaming.cost_profile`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.cost_plot import crossover_text, save_plot, table_rows
from benchmarks.measuring_process import measure_in_process
from cluster_configs.loading import LoadedConfig
from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError
from command_line.output import err, out, print_json, print_table
from prefill_worker.preemption import CostModel, crossover_tokens, default_model


class ProgressReports:
    """A measurement's reports as a progress bar; a line per phase where there is no terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if not err.is_terminal:
            err.print(text)

    def total(self, steps: int) -> None:
        self._progress.update(self._task, total=steps)

    def done(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)


@contextmanager
def progress_reports() -> Iterator[ProgressReports]:
    with Progress(
        TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn(), console=err,
        # Drawing takes the processor from what is being timed.
        refresh_per_second=1, disable=not err.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        yield ProgressReports(progress, progress.add_task("starting", total=None))


def check_writable(file: Path, option: str) -> None:
    """Before minutes of measuring, not after. Raises ConfigError."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", field=option)
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {file}", field=option)


async def profile(loaded: LoadedConfig, output: Path, plot: Path | None, repetitions: int, *, as_json: bool) -> None:
    plot = plot or output.with_suffix(".png")
    check_writable(output, "--output")
    check_writable(plot, "--plot")
    if plot == output:
        raise ConfigError("must be another file than --output", field="--plot")
    began_s = monotonic_s()
    arguments = {
        "config": loaded.config.model_dump(mode="json"),
        "repetitions": repetitions,
        "seed": loaded.config.engine.seed,
        "output": str(output),
    }
    with progress_reports() as reports:
        await measure_in_process("benchmarks.cost_profile", arguments, reports)
    model = CostModel.load(output, default_model(loaded.config.engine.device))
    save_plot(model, plot)
    crossover = crossover_text(model)
    if as_json:
        print_json(_result(model, output, plot, crossover, monotonic_s() - began_s))
        return
    columns = ("tokens", "recompute ms", "swap out ms", "swap in ms", "swap ms", "cheaper", "log scale")
    print_table("", columns, table_rows(model))
    out.print(f"swap is cheaper: {crossover}; took {monotonic_s() - began_s:.0f} s; picture in {plot}")
    out.print(f"to use it: --set streaming.cost_profile={output}")


def _result(model: CostModel, output: Path, plot: Path, crossover: str, took_s: float) -> dict[str, Any]:
    return {
        "profile": str(output),
        "plot": str(plot),
        "crossover": crossover,
        "crossover_tokens": crossover_tokens(model),
        "recompute_ms": {str(size): round(ms, 4) for size, ms in model.recompute.points.items()},
        "swap_out_ms": {str(size): round(ms, 4) for size, ms in model.swap_out.points.items()},
        "swap_in_ms": {str(size): round(ms, 4) for size, ms in model.swap_in.points.items()},
        "took_s": round(took_s, 1),
        "metadata": dict(model.metadata),
    }
