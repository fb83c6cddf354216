"""The options of `rachis bench simulator`; simulator_run.py does the work."""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from cluster_core.errors import ConfigError
from command_line import options


class Against(StrEnum):
    """imitated: workers that take a cost model's time and compute nothing. cpu: workers that compute."""

    IMITATED = "imitated"
    CPU = "cpu"


class Engine(StrEnum):
    """Of a scenario."""

    VLLM = "vllm"
    LIGHT = "light"


def register(bench: typer.Typer) -> None:
    bench.command("simulator")(simulator_command)


def simulator_command(
    against: Annotated[
        Against,
        typer.Option(
            help="imitated: a service that takes the time of the simulator's own cost model, so that what differs is "
            "software. cpu: one that computes, whose costs are measured first."
        ),
    ] = Against.IMITATED,
    workload: Annotated[
        list[str] | None, typer.Option(help="Imitated only, with commas or several times; default is all five.")
    ] = None,
    load: Annotated[
        list[str] | None, typer.Option(help="Of low, middle and high, likewise; default is all three.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=5, max=3600, help="In which the requests of one load arrive, imitated only.")
    ] = 45.0,
    engine: Annotated[
        Engine, typer.Option(help="Of the scenario: vllm, with vLLM's own schedulers, or light; imitated only.")
    ] = Engine.VLLM,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=20, help="Of each; the median counts. Default is 1, of cpu 3.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """What the simulator predicts of a service on this machine, beside what that does. Wants a quiet machine."""
    from command_line.bench import simulator_run

    if against is Against.CPU:
        loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
        run = simulator_run.bench_computing(loaded, options.state_file(), rounds or 3, seed, as_json=as_json)
    else:
        from benchmarks.validation import imitated
        from benchmarks.validation.loads import LOADS, WORKLOADS

        # Who names a profile or a file has an imitated service of their own.
        extra = options.BOTH_POOLS if profile or config else dict(imitated.SETTINGS)
        loaded = options.load_config(profile, config, assignments, model, extra)
        asked = simulator_run.Asked(
            _known(workload, WORKLOADS, "--workload"),
            _known(load, LOADS, "--load"),
            seconds,
            rounds or 1,
            seed,
            engine.value,
        )
        run = simulator_run.bench_imitated(loaded, options.state_file(), asked, as_json=as_json)
    asyncio.run(run)


def _known(given: list[str] | None, known: Mapping[str, object], option: str) -> tuple[str, ...]:
    """Raises ConfigError for a name that there is not."""
    names = [name for each in given or () for name in each.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"must be one of {', '.join(known)}, got {name!r}", field=option)
    return tuple(names or known)
