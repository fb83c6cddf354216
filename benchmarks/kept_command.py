"""`rachis serve` or `rachis route` as whoever keeps it runs it: on one port, and started again when it was killed."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster_core.errors import StartError
from cluster_core.ports import hold_port
from control_plane.service.child_process import bind_to_parent

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
# What the command says once it can be asked.
_UP = {"serve": "ready", "route": "listening"}


class KeptCommand:
    """settings: by key, beside `router.port`. folder: for its state and its log."""

    def __init__(self, command: str, settings: Mapping[str, object], folder: Path) -> None:
        port = hold_port(_HOST)
        self.address = f"{_HOST}:{port}"
        self.process: asyncio.subprocess.Process | None = None
        self._command = command
        values = {**settings, "router.host": _HOST, "router.port": port}
        self._settings = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        self._folder = folder

    async def start(self, on_event: Callable[[Mapping[str, str]], None] = lambda event: None) -> None:
        """on_event: hears what it says until it is up. Raises StartError where it does not come up."""
        with (self._folder / f"{self._command}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "command_line.main", self._command, "--json", *self._settings,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, "RACHIS_STATE_DIR": str(self._folder)}, preexec_fn=bind_to_parent,
                start_new_session=True,
            )  # fmt: skip
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._until_up(self.process, on_event)
        except TimeoutError:
            await self.ended()
            raise StartError(f"rachis {self._command} did not start in {_START_TIMEOUT_S:g} s") from None

    async def ended(self) -> None:
        """What is left of a start is ended as well."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.communicate()

    async def stop(self) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.process.communicate()
        except TimeoutError:
            await self.ended()

    async def _until_up(
        self, process: asyncio.subprocess.Process, on_event: Callable[[Mapping[str, str]], None]
    ) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line)
            on_event(event)
            if event.get("event") == _UP[self._command]:
                return
        await process.wait()
        log = (self._folder / f"{self._command}.log").read_text(errors="replace").strip().splitlines()
        raise StartError(f"rachis {self._command} did not start: {log[-1] if log else 'it said nothing'}")
