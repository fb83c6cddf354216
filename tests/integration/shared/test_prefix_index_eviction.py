"""The prefix index where nothing fits: blocks come and go, between device and host memory and for good."""

import asyncio
import os
import random
import signal

import pytest
from rachis import AsyncClient

from command_line.own_service import Target
from tests.integration.conftest import came_back, worker_of
from tests.integration.prefix_families import PREFIX_CHUNKS, Families, claims_are_true

pytestmark = pytest.mark.integration


async def test_under_eviction_the_index_stays_in_step_with_the_pools(small: tuple[Target, AsyncClient]) -> None:
    """Device and host memory hold a part of what is asked for; a worker is killed meanwhile."""
    client = small[1]
    families = Families(client)
    rng = random.Random(6)
    for turn in range(2):
        questions = [(rng.randrange(12), rng.randrange(4)) for _ in range(32)]
        for start in range(0, len(questions), 4):
            await asyncio.gather(*(families.ask(*each) for each in questions[start : start + 4]))
        checked = await claims_are_true(client, 2, at_least=1)
        held = sum(check.device.agreed + check.host.agreed for check in checked)
        assert held < 12 * 4 * PREFIX_CHUNKS, "not all of it fits"
        if turn == 0:
            pid, number = await worker_of(client, "prefill-0")
            os.kill(pid, signal.SIGKILL)
            await came_back(client, "prefill-0", number)
