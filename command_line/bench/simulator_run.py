"""`rachis bench simulator`: what the simulator predicts of a real cluster on this machine, beside what that does."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rachis import AsyncClient
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.validation import measure as validation
from cluster_configs.loading import LoadedConfig
from command_line.output import out, print_json, print_table
from command_line.own_service import target_service
from command_line.progress import quiet_progress
from control_plane.service.state import StateFile

_COLUMNS = ("load", "figure", "predicted", "measured", "ratio", "within")


async def bench_simulator(
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
    if as_json:
        print_json(found)
        return
    _print(found)


def _print(found: Mapping[str, Any]) -> None:
    rows = [tuple(_text(each[name]) for name in _COLUMNS) for each in found["comparisons"]]
    print_table("predicted by the simulator, and measured", _COLUMNS, rows)
    out.print(f"{found['within']} of {found['of']} within {found['tolerance']:.0%}")
    if max(found["foreign_cores"].values()) > validation.QUIET_CORES:
        out.print("other processes took cores meanwhile: the machine has to be quiet for this", style="yellow")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
