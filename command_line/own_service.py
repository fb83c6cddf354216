"""A service for the length of one command: `verify`, `bench` and `demo` start one where none runs.

It is `rachis serve` in a process of its own, so what is measured includes no client, and it ends with this process.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster_configs.loading import LoadedConfig
from cluster_core.errors import StartError
from command_line.output import PhaseDisplay, err, phases
from control_plane.service.child_process import bind_to_parent
from control_plane.service.state import StateFile

_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A router to talk to. start_s and pid are known for an own service only."""

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
    elif running is not None and running.address:
        yield Target(running.address, pid=running.pid)
    else:
        with tempfile.TemporaryDirectory(prefix="rachis-own-") as folder:
            with phases() as display:
                process, target = await _start(loaded, Path(folder), display)
            try:
                yield target
            finally:
                with phases() as display:
                    display.show("service", "stopping")
                    await _stop(process)


async def _start(
    loaded: LoadedConfig, folder: Path, display: PhaseDisplay
) -> tuple[asyncio.subprocess.Process, Target]:
    values = {entry.key: entry.value for entry in loaded.entries if entry.source != "default"}
    values.update({"router.port": 0, "router.host": "127.0.0.1"})
    tree: dict[str, object] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})  # type: ignore[assignment]
        table[last] = value
    file = folder / "config.yaml"
    file.write_text(json.dumps(tree))
    log = (folder / "serve.log").open("w+b")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "command_line.main", "serve", "--json", "--config", str(file),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
        env={**_without_settings(), "RACHIS_STATE_DIR": str(folder)}, preexec_fn=bind_to_parent, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    async for line in process.stdout:
        event = _event(line)
        if event.get("event") == "phase":
            display.show(event["part"], event["phase"])
        elif event.get("event") == "ready":
            return process, Target(event["address"], float(event["start_s"]), process.pid)
    await process.wait()
    log.seek(0)
    reason = log.read().decode(errors="replace").strip().splitlines()
    raise StartError(f"the service did not start: {reason[-1] if reason else 'it said nothing'}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.returncode:
        err.print(f"the service ended with {process.returncode} instead of 0")


def _event(line: bytes) -> dict[str, str]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _without_settings() -> dict[str, str]:
    """The environment without what has already become part of the configuration file."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RACHIS_")}
