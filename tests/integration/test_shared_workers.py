"""Two real workers that do both: each prefills for the other and pulls from it, while both decode besides."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rachis.v1 import generation_pb2 as generation

from cluster_configs.schema import EngineSection, HandoffSection
from tests.integration.conftest import until
from tests.integration.worker_processes import WorkerProcess, shared_pair

pytestmark = pytest.mark.integration

ENGINE = EngineSection(kv_blocks=80, max_model_len=1024)
PROMPTS = 6


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    async with shared_pair(tmp_path, HandoffSection(verify_share=1.0), ENGINE) as workers:
        yield workers


def _prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(500)]


async def _handed_off(source: WorkerProcess, target: WorkerProcess, tokens: list[int]) -> tuple[list[int], bool]:
    """The answer, and whether its KV was pulled."""
    answer = await target.decode(tokens, await source.prefill(tokens))
    return answer.token_ids, answer.started.handoff == generation.HANDOFF_OUTCOME_PULLED


async def test_leases_out_and_pulls_in_beside_whole_requests_give_the_tokens_of_one_engine(
    pair: tuple[WorkerProcess, WorkerProcess],
) -> None:
    one, other = pair
    ways = [(one, other), (other, one)] * (PROMPTS // 2)
    busy = [asyncio.create_task(each.decode(_prompt(100), max_tokens=300)) for each in pair]
    answers = await asyncio.gather(
        *(_handed_off(*way, _prompt(number)) for number, way in enumerate(ways)),
    )
    long = await asyncio.gather(*busy)
    # Each was decoded by the one, and is computed whole by the other.
    fresh = [(await source.decode(_prompt(number))).token_ids for number, (source, _) in enumerate(ways)]

    assert [tokens for tokens, _ in answers] == fresh
    assert sum(was_pulled for _, was_pulled in answers) >= PROMPTS - 1, "on a busy machine one may be late"
    assert long[0].token_ids == long[1].token_ids
    for each in pair:
        counters = (await each.status()).counters
        assert counters.handoffs_pulled and counters.handoffs_leased
        assert not counters.handoffs_mismatched
        await until(each.nothing_held, "the blocks are free")
