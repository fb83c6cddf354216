"""A service for the length of one command: `verify`, `bench` and `demo` start one where none runs.

It is `rachis serve` in a process of its own, so what is measured includes no client, and it ends with this process.
"""

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.kept_command import KeptCommand
from cluster_configs.loading import LoadedConfig
from command_line.output import PhaseDisplay, err, phases
from control_plane.service.state import StateFile


@dataclass(frozen=True, slots=True)
class Target:
    """A router to talk to, where it answers administration too. start_s and pid are known for an own service only."""

    address: str
    start_s: float | None = None
    pid: int | None = None


@asynccontextmanager
async def target_service(
    address: str | None, state_file: StateFile, loaded: LoadedConfig, *, always_own: bool = False
) -> AsyncIterator[Target]:
    """The router at `address`, else the service that runs here, else an own one, stopped at the end."""
    running = None if always_own else state_file.read()
    if address is not None:
        yield Target(address)
    elif running is not None and running.admin_address:
        yield Target(running.admin_address, pid=running.pid)
    else:
        with tempfile.TemporaryDirectory(prefix="rachis-own-") as folder:
            limit_s = loaded.config.limits.start_timeout_s
            service = KeptCommand("serve", own_settings(loaded), Path(folder), start_timeout_s=limit_s)
            with phases() as display:
                up = await service.start(partial(show_phase, display))
            assert service.process is not None
            try:
                yield Target(service.address, float(up["start_s"]), service.process.pid)
            finally:
                with phases() as display:
                    display.show("service", "stopping")
                    status = await service.stop()
                if status:
                    err.print(f"the service ended with {status} instead of 0")


def own_settings(loaded: LoadedConfig) -> dict[str, object]:
    """What somebody has set, by key."""
    return {entry.key: entry.value for entry in loaded.entries if entry.source != "default"}


def show_phase(display: PhaseDisplay, event: Mapping[str, str]) -> None:
    if event.get("event") == "phase":
        display.show(event["part"], event["phase"])
