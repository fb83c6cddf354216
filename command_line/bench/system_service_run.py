"""`rachis bench system --grid --imitated`: cells of the grid on own services over imitated GPUs, beside simulated."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rachis import AsyncClient
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.system_grid_service import STUDY, measure
from benchmarks.validation.measure import QUIET_CORES
from command_line import options
from command_line.bench.system_run import numbers_of
from command_line.output import out, print_json, print_table
from command_line.own_service import target_service
from command_line.progress import quiet_progress
from control_plane.service.state import StateFile


@asynccontextmanager
async def _started(state_file: StateFile, settings: Mapping[str, Any]) -> AsyncIterator[AsyncClient]:
    loaded = options.load_config(None, None, None, None, dict(settings))
    async with (
        target_service(None, state_file, loaded, always_own=True) as target,
        AsyncClient(target.address) as client,
    ):
        yield client


def bench_system_service(rates: str | None, seconds: float | None, seed: int, *, as_json: bool) -> None:
    """Raises ConfigError naming the option."""
    study = replace(STUDY, seconds=seconds or STUDY.seconds, seeds=(seed,))
    if rates is not None:
        study = replace(study, rates=tuple(sorted(set(numbers_of(rates, "--rates", 1e-6, 1e6)))))
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with quiet_progress(*columns, hidden=as_json) as progress:
        task = progress.add_task("")
        found = asyncio.run(
            measure(
                partial(_started, options.state_file()),
                study,
                lambda text: progress.update(task, description=text),
            )
        )
    if as_json:
        print_json(found)
        return
    rows = [
        (
            f"{run['ttft_s']:g} s", f"{run['tpot_ms']:g} ms", f"{run['requests_per_s']:g}", run["set_up"],
            f"{run['measured']:.1%}", f"{run['simulated']:.1%}", run["refused"], run["requests"],
        )
        for run in sorted(found["runs"], key=lambda run: (run["ttft_s"], run["tpot_ms"], run["requests_per_s"]))
    ]  # fmt: skip
    columns_of = ("TTFT", "TPOT", "requests/s", "set-up", "measured", "simulated", "refused", "requests")
    print_table(f"{found['workers']} imitated workers: requests that keep both objectives", columns_of, rows)
    if found["failed"]:
        out.print(f"{found['failed']} requests failed", style="yellow")
    if max(run["foreign_cores"] for run in found["runs"]) > QUIET_CORES:
        out.print("other processes took cores meanwhile: the machine has to be quiet for this", style="yellow")
