"""A service that is killed takes everything along that it has started."""

import asyncio
import os
import signal
from contextlib import suppress

import psutil
import pytest
from rachis import AsyncClient

from command_line.own_service import Target
from control_plane.service.state import processes_of

# It ends the small service that others share.
pytestmark = [pytest.mark.integration, pytest.mark.leaves_less]


async def test_a_killed_service_leaves_no_process(small: tuple[Target, AsyncClient]) -> None:
    target, client = small
    killed = (await client.router_status()).service_id
    assert target.pid is not None
    below = psutil.Process(target.pid).children(recursive=True)
    assert processes_of(killed)
    os.kill(target.pid, signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, below, 60)
    assert alive == []
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(target.pid).status() == psutil.STATUS_ZOMBIE
    assert processes_of(killed) == []
