"""A module of the benchmarks as a process of its own, which says lines of JSON and ends with who started it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from cluster_core.bound_child import bind_to_parent
from cluster_core.errors import UnavailableError
from control_plane.service import child_process

_STOP_S = 10.0
_ANSWER_S = 120.0


@asynccontextmanager
async def running(module: str, arguments: Mapping[str, Any], folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """arguments: in a file that the module is started with. folder: for that and the module's log."""
    file = folder / f"{module}.json"
    file.write_text(json.dumps(arguments))
    with file.with_suffix(".log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, str(file), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=log, preexec_fn=bind_to_parent,
        )  # fmt: skip
    try:
        yield process
    finally:
        await child_process.end(process, _STOP_S)


async def said(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next line. Raises UnavailableError where the process has ended, or says nothing."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_ANSWER_S):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        raise UnavailableError("a process of the measurement has ended, or says nothing")
    found: dict[str, Any] = json.loads(line)
    return found


def cpu_s(process: psutil.Process) -> float:
    """Of all its threads; told in hundredths of a second."""
    times = process.cpu_times()
    return float(times.user + times.system)
