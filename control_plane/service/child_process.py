"""A child process that does not outlive its parent, not even one that is killed."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_core.bound_child import bind_to_parent


def start_bound(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `command`, bound to the thread that called this, and out of reach of a terminal's Ctrl-C."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=bind_to_parent,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Asks it to end, and ends it when it does not."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout_s)


async def end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """The same of a child of asyncio, one that has ended too. Whoever has inherited its output is not waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def event(line: bytes) -> Mapping[str, Any]:
    """What a command with `--json` says; empty for a line that is no object."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
