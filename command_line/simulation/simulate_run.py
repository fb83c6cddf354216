"""`rachis simulate`: a scenario file, its variants one after the other, side by side in a table, plots and a page."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError
from cluster_sim.reports import html_report, plots, report
from cluster_sim.reports.figures import Figures, as_json
from cluster_sim.scenario import Scenario, ScenarioFile, check, make_world, read, workload_of
from cluster_sim.workloads.requests import Workload
from cluster_sim.world import World
from command_line.output import out, print_json
from command_line.output_files import check_picture, check_writable
from command_line.progress import quiet_progress


@dataclass(frozen=True, slots=True)
class Options:
    """As given."""

    scenario: Path
    # `key=value` for all variants.
    changes: Sequence[str] = ()
    seed: int | None = None
    plot: Path | None = None
    html: Path | None = None
    # CCDF and series in the JSON as well.
    curves: bool = False
    # What the simulation itself took, in the JSON as well; it is not the same twice.
    timing: bool = False


def simulate(options: Options, *, as_json_text: bool) -> None:
    """Raises ConfigError for a scenario or option that cannot be."""
    overrides = dict(_change(each) for each in options.changes)
    if options.seed is not None:
        overrides["seed"] = options.seed
    scenarios = read(options.scenario, overrides)
    check(scenarios)
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    if options.html is not None:
        check_writable(options.html, "--html")
    with progress_bar(quiet=as_json_text) as progress:
        runs, took_s = _run(scenarios, progress)
    if options.plot is not None:
        plots.save(runs, scenarios.name, options.plot)
    if options.html is not None:
        html_report.save(scenarios.name, scenarios.text, runs, options.html, _notes(overrides))
    if as_json_text:
        print_json(_result(scenarios, runs, took_s if options.timing else None, curves=options.curves))
        return
    for table in report.tables(runs, out.width, scenarios.name):
        out.print(table)
    requests, seconds = sum(run.requests for run in runs), max(1e-9, sum(took_s))
    simulated_s = sum(run.duration_s for run in runs)
    out.print(
        f"{requests} requests, {simulated_s:.0f} s simulated in {seconds:.1f} s: {simulated_s / seconds:.0f} x",
        markup=False,
    )
    for written in (options.plot, options.html):
        if written is not None:
            out.print(f"written: {written}", markup=False)


def run_scenario(scenario: Scenario, progress: Progress | None = None) -> Figures:
    """One variant."""
    workload = workload_of(scenario)
    world = make_world(scenario, block_tokens=workload.block_tokens)
    # Engines are many objects that stay: the collector need not look at them again and again.
    gc.collect()
    gc.freeze()
    try:
        return _watched(world, workload, scenario, progress)
    finally:
        gc.unfreeze()


def _watched(world: World, workload: Workload, scenario: Scenario, progress: Progress | None) -> Figures:
    if progress is None:
        return world.run(workload)
    task: TaskID = progress.add_task(scenario.name, total=scenario.workload.requests or None)
    figures = world.run(workload, lambda number: progress.advance(task, number))
    progress.update(task, total=figures.requests, completed=figures.requests)
    return figures


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with quiet_progress(*columns, hidden=quiet) as progress:
        yield progress


def _run(scenarios: ScenarioFile, progress: Progress) -> tuple[list[Figures], list[float]]:
    runs, took_s = [], []
    for scenario in scenarios.variants:
        began_s = monotonic_s()
        runs.append(run_scenario(scenario, progress))
        took_s.append(monotonic_s() - began_s)
    return runs, took_s


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"must be KEY=VALUE such as pools.prefill.workers=8, got {text}", field="--set")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"`{value}` is not a YAML value", field="--set") from None


def _notes(overrides: dict[str, Any]) -> list[str]:
    if not overrides:
        return []
    return ["Changed for all variants: " + ", ".join(f"{key} = {value}" for key, value in overrides.items())]


def _result(
    scenarios: ScenarioFile, runs: Sequence[Figures], took_s: Sequence[float] | None, *, curves: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {"scenario": scenarios.name, "seed": scenarios.variants[0].seed}
    result["variants"] = [as_json(run, curves=curves) for run in runs]
    if took_s is not None:
        for variant, run, seconds in zip(result["variants"], runs, took_s, strict=True):
            variant["simulation_s"] = round(seconds, 3)
            variant["times_real_time"] = round(run.duration_s / max(seconds, 1e-9), 1)
    return result
