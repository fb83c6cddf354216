"""`rachis bench simulator`: what the simulator predicts of a service on this machine, beside what that does."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rachis import AsyncClient
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.validation import imitated
from benchmarks.validation import measure as validation
from benchmarks.validation.comparison import COLUMNS
from benchmarks.validation.simulated import EngineKind, costs_of
from cluster_configs.loading import LoadedConfig
from command_line.output import out, print_json, print_table
from command_line.own_service import target_service
from command_line.progress import quiet_progress
from control_plane.service.state import StateFile


@dataclass(frozen=True, slots=True)
class Asked:
    # See `imitated.measure`.
    workloads: tuple[str, ...]
    loads: tuple[str, ...]
    seconds: float
    rounds: int
    seed: int
    # See `imitated.judged`.
    engine_kind: EngineKind


async def bench_imitated(loaded: LoadedConfig, state_file: StateFile, asked: Asked, *, as_json: bool) -> None:
    """Always on an own service. loaded: with `imitated.SETTINGS`, or another imitated service."""
    costs_of(loaded.config)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with quiet_progress(*columns, hidden=as_json) as progress:
        task = progress.add_task("starting")

        def on_phase(text: str) -> None:
            progress.update(task, description=text)

        async with (
            target_service(None, state_file, loaded, always_own=True) as target,
            AsyncClient(target.address) as client,
        ):
            measurement = await imitated.measure(
                client, loaded.config, workloads=asked.workloads, loads=asked.loads, seconds=asked.seconds,
                rounds=asked.rounds, seed=asked.seed, on_phase=on_phase,
            )  # fmt: skip
        found = imitated.judged(loaded.config, measurement, asked.engine_kind, on_phase)
    _tell(found, max(each["foreign_cores"] for each in found["runs"]), as_json=as_json)


async def bench_computing(
    loaded: LoadedConfig, state_file: StateFile, rounds: int, seed: int, *, as_json: bool
) -> None:
    """Always on an own service. loaded: with `validation.SETTINGS`."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with tempfile.TemporaryDirectory() as folder, quiet_progress(*columns, hidden=as_json) as progress:
        task = progress.add_task("starting")
        async with (
            target_service(None, state_file, loaded, always_own=True) as target,
            AsyncClient(target.address) as client,
        ):
            found = await validation.validate(
                client, loaded.config, Path(folder), rounds=rounds, seed=seed,
                on_phase=lambda text: progress.update(task, description=text),
            )  # fmt: skip
    _tell(found, max(found["foreign_cores"].values()), as_json=as_json)


def _tell(found: dict[str, Any], foreign_cores: float, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [tuple(_text(each[name]) for name in COLUMNS) for each in found["figures"]]
    print_table("measured, and predicted by the simulator", COLUMNS, rows)
    percent = round(found["tolerance"] * 100)
    out.print(f"{found[f'within_{percent}_percent']} of {found['of']} within {percent}%")
    if foreign_cores > validation.QUIET_CORES:
        out.print("other processes took cores meanwhile: the machine has to be quiet for this", style="yellow")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
