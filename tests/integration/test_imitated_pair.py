"""The hand-off between two imitated GPUs: what is pulled, told, leased and lost goes the way it goes between real ones.

One pair for all; the last test takes a worker away.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rachis.v1 import generation_pb2 as generation

from cluster_configs.schema import EngineSection, HandoffSection
from tests.integration.conftest import until
from tests.integration.worker_processes import WorkerProcess, worker_pair

pytestmark = pytest.mark.integration

ENGINE = EngineSection(device="imitated", cost_model="h100-llama-3.1-8b", kv_blocks=None, max_model_len=16_384)
BLOCK_TOKENS = 32
# Llama-3.1-8B: 32 layers of 8 heads of 128 numbers, keys and values, two bytes each.
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
LEASE_S = 6

Pair = tuple[WorkerProcess, WorkerProcess]


@pytest_asyncio.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    handoff = HandoffSection(lease_s=LEASE_S, deadline_s=3.0)
    folder = tmp_path_factory.mktemp("imitated")
    async with worker_pair(folder, handoff, prefill_engine=ENGINE, decode_engine=ENGINE) as workers:
        yield workers


def prompt(variant: int, tokens: int = 20 * BLOCK_TOKENS) -> list[int]:
    return [(number * 7 + variant) % 90 for number in range(tokens)]


async def test_a_prompt_is_pulled_with_the_bytes_of_its_model_and_answered_as_by_one_worker(pair: Pair) -> None:
    prefill, decode = pair
    answer = await decode.decode(prompt(1), await prefill.prefill(prompt(1)), max_tokens=40)
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_PULLED
    assert answer.started.kv_bytes == len(prompt(1)) * KV_BYTES_PER_TOKEN
    alone = await decode.decode(prompt(1), max_tokens=40)
    assert answer.token_ids == alone.token_ids
    for worker in pair:
        await until(worker.nothing_held, "the blocks are free on both sides", LEASE_S / 2)


async def test_a_lease_that_nobody_pulls_ends_by_itself(pair: Pair) -> None:
    prefill, _ = pair
    await prefill.prefill(prompt(2))
    assert (await prefill.status()).load.leased_handoffs == 1
    await until(prefill.nothing_held, "the lease has ended")


async def test_a_pull_after_its_deadline_is_recomputed(pair: Pair) -> None:
    prefill, decode = pair
    prefilled = await prefill.prefill(prompt(3))
    await until(prefill.nothing_held, "the lease has ended")
    answer = await decode.decode(prompt(3), prefilled)
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert answer.token_ids == (await decode.decode(prompt(3))).token_ids


async def test_what_is_cached_is_pulled_by_nobody(pair: Pair) -> None:
    prefill, decode = pair
    longer = [*prompt(1), *prompt(4, BLOCK_TOKENS)]
    answer = await decode.decode(longer, await prefill.prefill(longer))
    assert answer.started.pulled_tokens == BLOCK_TOKENS


async def test_many_at_once_are_all_pulled(pair: Pair) -> None:
    prefill, decode = pair

    async def pulled(variant: int) -> generation.HandoffOutcome.ValueType:
        tokens = prompt(100 + variant)
        return (await decode.decode(tokens, await prefill.prefill(tokens))).started.handoff

    outcomes = await asyncio.gather(*(pulled(variant) for variant in range(24)))
    assert set(outcomes) == {generation.HANDOFF_OUTCOME_PULLED}
    for worker in pair:
        await until(worker.nothing_held, "the blocks are free on both sides")


async def test_a_worker_says_what_it_imitates(pair: Pair) -> None:
    assert {(await worker.status()).registration.model.imitates for worker in pair} == {"h100-llama-3.1-8b"}


async def test_a_prompt_whose_prefill_worker_is_gone_is_recomputed(pair: Pair) -> None:
    """Comes last."""
    prefill, decode = pair
    prefilled = await prefill.prefill(prompt(5))
    prefill.kill()
    answer = await decode.decode(prompt(5), prefilled)
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert answer.token_ids == (await decode.decode(prompt(5))).token_ids
