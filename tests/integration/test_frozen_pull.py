"""A pull whose other side is frozen: its request is answered at the deadline all the same, from blocks of its own.

TCP between the two engines, as between hosts: through shared memory a frozen process can be read.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from rachis.v1 import generation_pb2 as generation

from cluster_configs.schema import EngineSection, HandoffSection
from tests.integration.conftest import until
from tests.integration.worker_processes import WorkerProcess, worker_pair

pytestmark = pytest.mark.integration

SMALL = EngineSection(kv_blocks=100, max_model_len=2048)
HANDOFF = HandoffSection(lease_s=10, deadline_s=4.0)
# Nobody waits that long for a pull of four seconds.
PATIENCE_S = 120.0


def prompt(variant: int) -> list[int]:
    return [(7 * index + 13 * variant + index * index * variant) % 250 for index in range(1000)]


@pytest_asyncio.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    tcp = {"UCX_TLS": "tcp"}
    folder = tmp_path_factory.mktemp("frozen")
    async with worker_pair(folder, HANDOFF, prefill_engine=SMALL, decode_engine=SMALL, environment=tcp) as workers:
        yield workers


def threads_stand_still(pid: int) -> bool:
    try:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except FileNotFoundError:
        # One has just ended.
        return False
    return all(each.rpartition(")")[2].split()[0] == "T" for each in stats)


async def is_frozen(pid: int) -> bool:
    """The signal is sent before its threads have heard of it: one that still runs may serve a whole pull."""
    return threads_stand_still(pid)


async def test_a_pull_from_a_frozen_process_ends_at_its_deadline_and_its_blocks_are_kept_apart(
    pair: tuple[WorkerProcess, WorkerProcess],
) -> None:
    prefill, decode = pair

    unasked = itertools.count(10)

    async def one_is_pulled() -> bool:
        asked = prompt(next(unasked))
        first = await decode.decode(asked, await prefill.prefill(asked))
        return first.started.handoff == generation.HANDOFF_OUTCOME_PULLED

    # A pull whose handshake is not done writes nowhere when it is given up, and has no blocks to keep apart.
    await until(one_is_pulled, "the two engines know each other, and a pull got through")
    leased = await prefill.prefill(prompt(2))
    pid = prefill.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(partial(is_frozen, pid), "all threads of the process stand still")
        async with asyncio.timeout(PATIENCE_S):
            answer = await decode.decode(prompt(2), leased)
        held = (await decode.status()).load
        # What the pull may write into is nobody's, and others go on beside it.
        expected = await decode.decode(prompt(2))
    finally:
        os.kill(pid, signal.SIGCONT)

    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert answer.token_ids == expected.token_ids
    assert held.quarantined_blocks >= 31

    async def all_is_free() -> bool:
        load = (await decode.status()).load
        return load.quarantined_blocks == 0 and load.free_blocks == load.total_blocks

    await until(all_is_free, "nothing is held once the transfer is over")
    again = await decode.decode(prompt(3), await prefill.prefill(prompt(3)))
    assert again.token_ids == (await decode.decode(prompt(3))).token_ids


async def test_the_blocks_of_a_request_that_left_during_a_frozen_pull_come_back(
    pair: tuple[WorkerProcess, WorkerProcess],
) -> None:
    prefill, decode = pair
    leased = await prefill.prefill(prompt(4))
    pid = prefill.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(partial(is_frozen, pid), "all threads of the process stand still")
        leaving = asyncio.create_task(decode.decode(prompt(4), leased))
        await asyncio.sleep(1.0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        expected = await decode.decode(prompt(5))
    finally:
        os.kill(pid, signal.SIGCONT)

    async def all_is_free() -> bool:
        load = (await decode.status()).load
        return load.quarantined_blocks == 0 and load.free_blocks == load.total_blocks

    await until(all_is_free, "nothing is held once the transfer is over")
    assert (await decode.decode(prompt(5))).token_ids == expected.token_ids
