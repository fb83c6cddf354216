"""Commands on a terminal whose encoding lacks what they draw with."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.fakes.cluster import DECODE, PREFILL, running_cluster


@pytest.mark.parametrize("command", [("trace", "the-request"), ("top", "--once")])
async def test_a_character_that_the_terminal_lacks_is_shown_as_another(command: tuple[str, ...]) -> None:
    async with running_cluster() as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        await cluster.generate(request_id="the-request")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "command_line.main", *command, "--address", cluster.router.address,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"COLUMNS": "120", "PYTHONIOENCODING": "latin-1"},
        )  # fmt: skip
        printed, complained = await process.communicate()
    assert (process.returncode, complained) == (0, b"")
    assert b"?" in printed


async def test_a_stream_that_was_a_file_and_is_a_pipe_now_is_written_to(tmp_path: Path) -> None:
    """As of processes that are forked from one that has loaded vLLM."""
    becomes = "import os, sys; sys.stdout = open(sys.argv.pop(1), 'w'); os.dup2(1, sys.stdout.fileno())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{becomes}\nfrom command_line.main import run; run()", str(tmp_path / "f"), "--version",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, complained = await process.communicate()
    assert (process.returncode, complained) == (0, b"")
    assert b"vLLM" in printed
