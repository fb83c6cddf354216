"""`rachis plan`: how many prefill and decode workers a trace needs for its objectives, by simulation."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster_core.errors import ConfigError, InvalidInputError
from cluster_sim.costs import catalog
from cluster_sim.planner import COLUMNS, Plan, PlanSettings, Trial, as_json, plan, table
from cluster_sim.reports.figures import Figures
from cluster_sim.scenario import PoolSection, PoolsSection, Scenario, SloSection, make_world, workload_of
from cluster_sim.workloads.section import WorkloadSection
from command_line.output import out, print_json, print_table
from command_line.progress import quiet_progress


@dataclass(frozen=True, slots=True)
class Options:
    """As given."""

    trace: Path
    slo_ttft_ms: float
    slo_tpot_ms: float
    attainment: float = 0.9
    cost_model: str = "h100-llama-3.1-8b"
    most_gpus: int = 64
    # How many times faster than recorded the trace is played.
    speed: float = 1.0
    # The first so many of the trace; 0: all.
    requests: int = 0
    most_runs: int = 60
    # The trace is a table of arrivals and lengths instead.
    azure: bool = False
    seed: int = 0


def plan_command(options: Options, *, as_json_text: bool) -> None:
    """Raises ConfigError for options that cannot be, and InvalidInputError where nothing keeps the objectives."""
    _check(options)
    scenario = _scenario(options)
    gpus = catalog.load(options.cost_model).gpus
    try:
        settings = PlanSettings(options.attainment, options.most_gpus, gpus, gpus, options.most_runs)
        with _progress(options, quiet=as_json_text) as reports:
            found = plan(lambda prefill, decode: _simulated(scenario, prefill, decode, reports), settings, reports.done)
    except InvalidInputError as error:
        raise _of_option(error) from None
    if as_json_text:
        print_json(_result(options, found))
        return
    _print(options, found)


def _check(options: Options) -> None:
    for name in ("slo_ttft_ms", "slo_tpot_ms", "speed", "attainment"):
        if not math.isfinite(getattr(options, name)):
            raise ConfigError(f"must be a finite number, got {getattr(options, name)}", field=_option(name))
    for name in ("slo_ttft_ms", "slo_tpot_ms", "requests", "seed"):
        if getattr(options, name) < 0:
            raise ConfigError(f"must not be below 0, got {getattr(options, name)}", field=_option(name))
    if options.speed <= 0:
        raise ConfigError(f"must be above 0, got {options.speed}", field="--speed")
    if not options.slo_ttft_ms and not options.slo_tpot_ms:
        raise ConfigError(
            "or --slo-tpot-ms must be above 0: without an objective two workers do", field="--slo-ttft-ms"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _scenario(options: Options) -> Scenario:
    return Scenario(
        name="plan",
        seed=options.seed,
        cost_model=options.cost_model,
        workload=WorkloadSection(
            kind="azure" if options.azure else "trace",
            file=options.trace,
            requests=options.requests,
            arrivals="trace",
            speed=options.speed,
        ),
        slo=SloSection(ttft_ms=options.slo_ttft_ms, tpot_ms=options.slo_tpot_ms),
    )


def _simulated(scenario: Scenario, prefill: int, decode: int, reports: "_Reports") -> Figures:
    pools = PoolsSection(prefill=PoolSection(workers=prefill), decode=PoolSection(workers=decode))
    workload = workload_of(scenario)
    world = make_world(scenario.model_copy(update={"pools": pools}), block_tokens=workload.block_tokens)
    reports.begins(prefill, decode)
    return world.run(workload, reports.ended)


def _of_option(error: InvalidInputError) -> InvalidInputError:
    """A setting of the planner is an option here."""
    message = str(error).removeprefix(f"{error.field}: ")
    known = ("attainment", "most_gpus", "most_runs")
    return InvalidInputError(message, field=_option(error.field) if error.field in known else error.field)


def _result(options: Options, found: Plan) -> dict[str, Any]:
    return {
        **as_json(found),
        "trace": str(options.trace),
        "requests": options.requests,
        "speed": options.speed,
        "cost_model": options.cost_model,
        "slo_ttft_ms": options.slo_ttft_ms,
        "slo_tpot_ms": options.slo_tpot_ms,
        "attainment_wanted": options.attainment,
        "seed": options.seed,
    }


def _print(options: Options, found: Plan) -> None:
    best = found.best
    names = (("TTFT", options.slo_ttft_ms), ("TPOT", options.slo_tpot_ms))
    objectives = " and ".join(f"{name} of at most {ms:g} ms" for name, ms in names if ms > 0)
    out.print(
        f"{best.gpus} GPUs: {best.prefill} prefill and {best.decode} decode workers of {options.cost_model} "
        f"({best.prefill / best.decode:.2f} prefill for each decode worker)"
    )
    out.print(f"{objectives}, for {options.attainment:.0%} of the requests")
    print_table("prefill + decode workers; P90 in ms, goodput in requests/s", COLUMNS, table(found))
    prefill, decode = found.least
    # Where everything arrives at once the work says nothing of how many keep up with it.
    has_bound = prefill <= best.prefill and decode <= best.decode
    work = f"; the work alone takes about {prefill} prefill and {decode} decode workers" if has_bound else ""
    out.print(
        f"simulated {found.runs} times{work}. "
        + (
            "Divisions of fewer GPUs around the answer were simulated too, what lies farther away was not."
            if found.verified
            else f"Not verified: --most-runs {options.most_runs} ended the search."
        )
    )


class _Reports:
    """Of the simulation that runs: how many requests have ended, and what was found so far."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._task = progress.add_task("", total=total, found="")

    def begins(self, prefill: int, decode: int) -> None:
        pools = f"{prefill} prefill, {decode} decode" if prefill else f"{decode} aggregated"
        self._progress.reset(self._task, description=pools, total=self._total)

    def ended(self, requests: int) -> None:
        self._progress.advance(self._task, requests)

    def done(self, trial: Trial) -> None:
        # A trace's length is known once it was played.
        self._total = self._total or int(self._progress.tasks[0].completed) or None
        self._progress.update(self._task, found=f"{trial.workers}: {trial.attainment:.1%} within")


@contextmanager
def _progress(options: Options, *, quiet: bool) -> Iterator[_Reports]:
    columns = (
        TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.fields[found]:<28}"), TimeElapsedColumn(),
    )  # fmt: skip
    with quiet_progress(*columns, hidden=quiet) as progress:
        yield _Reports(progress, options.requests or None)
