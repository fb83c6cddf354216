"""`rachis serve` or `rachis route` in a process of its own, which ends with this one; and, as whoever keeps a service
runs it, on one port, and started again when it was killed."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_configs.loading import tree_of
from cluster_core.bound_child import bind_to_parent
from cluster_core.errors import StartError
from cluster_core.ports import hold_port
from control_plane.service import child_process

_HOST = "127.0.0.1"
# Beyond what the command allows its own parts.
_SPARE_START_S = 120.0
_STOP_TIMEOUT_S = 60.0
# What the command says once it can be asked.
_UP = {"serve": "ready", "route": "listening"}
_WHAT = {"serve": "service", "route": "router"}


class KeptCommand:
    """settings: by key, beside `router.port`; nothing else of this process's own counts. folder: for its state, its log
    and its configuration, which is a file: a command line can be read by every user of the machine. start_timeout_s:
    what the configuration allows the engines. options: of the command. port: by default a free one, which is held."""

    def __init__(
        self,
        command: str,
        settings: Mapping[str, object],
        folder: Path,
        *,
        options: Sequence[str] = (),
        port: int | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        port = hold_port(_HOST) if port is None else port
        self.address = f"{_HOST}:{port}"
        self.process: asyncio.subprocess.Process | None = None
        self._command = command
        self._options = options
        # Whoever is measured shares the machine with no gateway that nobody asks.
        self._tree = tree_of({"gateway.port": None, **settings, "router.host": _HOST, "router.port": port})
        self._folder = folder
        self._start_timeout_s = start_timeout_s + _SPARE_START_S

    async def start(self, on_event: Callable[[Mapping[str, Any]], None] = lambda event: None) -> Mapping[str, Any]:
        """What it says once it is up. on_event: hears what it says until then. Raises StartError."""
        file = self._folder / f"{self._command}-{self.address.rpartition(':')[2]}.yaml"
        file.touch(mode=0o600)
        file.write_text(json.dumps(self._tree))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RACHIS_")}
        with file.with_suffix(".log").open("w+b") as log:
            process = self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "command_line.main", self._command, "--json", "--config", str(file),
                *self._options,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**environment, "RACHIS_STATE_DIR": str(self._folder)}, preexec_fn=bind_to_parent,
                start_new_session=True,
            )  # fmt: skip
            if (up := await self._until_up(process, on_event)) is not None:
                return up
            log.seek(0)
            reason = log.read().decode(errors="replace").strip().splitlines()
        raise StartError(f"the {_WHAT[self._command]} did not start: {reason[-1] if reason else 'it said nothing'}")

    async def killed(self) -> None:
        """What is left of a start is ended."""
        if self.process is not None:
            await child_process.kill(self.process)

    async def stop(self) -> int:
        """Its exit status; 0 where it never ran."""
        if self.process is None:
            return 0
        await child_process.end(self.process, _STOP_TIMEOUT_S)
        return self.process.returncode or 0

    async def _until_up(
        self, process: asyncio.subprocess.Process, on_event: Callable[[Mapping[str, Any]], None]
    ) -> Mapping[str, Any] | None:
        """None where it has ended, or has taken too long and is ended."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                async for line in process.stdout:
                    event = child_process.event(line)
                    on_event(event)
                    if event.get("event") == _UP[self._command]:
                        return event
                await process.wait()
        except TimeoutError:
            await child_process.kill(process)
        return None
