"""How the process of a plain engine ends."""

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest

from benchmarks import plain_engine


@pytest.mark.parametrize(("goes_on", "code"), [(False, 0), (True, -9)])
async def test_it_ends_by_itself_once_its_input_closes_and_is_killed_where_it_goes_on(goes_on: bool, code: int) -> None:
    """It was killed after half a minute each time, for an input that nobody had closed."""
    command = f"import sys, time; print(flush=True); sys.stdin.read(); time.sleep({600 * goes_on})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    await plain_engine.end(process, 1.0 if goes_on else 60.0)
    assert process.returncode == code
