"""The hand-off between two real engines when something is late, released, or gone.

A pull after the lease reads whatever the prefill worker has written there since: the negative control shows it, with
the deadline taken away.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import EngineSection, HandoffSection
from kv_transfer.handoff.content_check import CHECKSUMS_PARAM
from tests.integration.conftest import until
from tests.integration.worker_processes import CLOCK_AHEAD_S, Answer, WorkerProcess, worker_pair

pytestmark = pytest.mark.integration

# 40 blocks of 32 tokens: one other long prompt overwrites what a lease has let go.
SMALL = EngineSection(kv_blocks=40, max_model_len=1024)
ONE_AT_A_TIME = EngineSection(kv_blocks=100, max_model_len=3100, max_running_requests=1)
LEASE_S = 6
BLOCK_TOKENS = 32
DEADLINE_S = 1.0


@pytest_asyncio.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    handoff = HandoffSection(lease_s=LEASE_S, deadline_s=DEADLINE_S, verify_share=1.0)
    folder = tmp_path_factory.mktemp("guarded")
    async with worker_pair(folder, handoff, prefill_engine=SMALL, decode_engine=ONE_AT_A_TIME) as pair:
        yield pair


async def test_a_pull_is_in_time_by_redis_clock_whatever_the_clocks_of_the_hosts_say(
    guarded: tuple[WorkerProcess, WorkerProcess],
) -> None:
    prefill, decode = guarded
    for worker, ahead_s in zip(guarded, (CLOCK_AHEAD_S[name] for name in ("prefill", "decode")), strict=True):
        assert (await worker.status()).registration.clock_ahead_ms == pytest.approx(1000 * ahead_s, abs=500)

    async def pulled() -> bool:
        tokens = _prompt(7)
        # Of what it has cached no full block is pulled, and none is verified.
        await _forget(decode)
        answer = await decode.decode(tokens, await prefill.prefill(tokens))
        return answer.started.handoff == generation.HANDOFF_OUTCOME_PULLED

    # On a busy machine one may take longer than its deadline of a second.
    await until(pulled, "a hand-off is pulled")
    counters = (await decode.status()).counters
    assert counters.handoffs_verified >= 1
    assert counters.handoffs_mismatched == 0


async def test_a_pull_after_the_lease_is_recomputed_and_right(guarded: tuple[WorkerProcess, WorkerProcess]) -> None:
    answer, expected = await _pull_after_lease(*guarded, variant=1)
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert answer.token_ids == expected.token_ids


async def test_without_a_deadline_the_same_pull_is_wrong_in_silence_unless_its_content_is_verified(
    tmp_path: Path,
) -> None:
    """The negative control, with the bug planted: a deadline far behind the lease."""
    planted = HandoffSection.model_construct(lease_s=LEASE_S, deadline_s=3600.0, verify_share=1.0)
    async with worker_pair(tmp_path, planted, prefill_engine=SMALL, decode_engine=ONE_AT_A_TIME) as (prefill, decode):
        unverified, expected = await _pull_after_lease(prefill, decode, variant=2, is_verified=False)
        assert unverified.started.handoff == generation.HANDOFF_OUTCOME_PULLED
        assert unverified.token_ids != expected.token_ids

        verified, expected = await _pull_after_lease(prefill, decode, variant=3)
        assert verified.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
        assert verified.token_ids == expected.token_ids
        counters = (await decode.status()).counters
        assert (counters.handoffs_verified, counters.handoffs_mismatched) == (1, 1)


async def test_an_answer_that_goes_on_is_pulled_with_its_prompt(guarded: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = guarded
    sampling: dict[str, Any] = {"max_tokens": 120}

    async def pulled() -> bool:
        tokens = _prompt(8)[:800]
        whole = await decode.decode(tokens, **sampling)
        assert len(whole.token_ids) == 120
        # Longer than what the decode worker has cached of it, by several blocks.
        await _forget(decode)
        so_far = whole.token_ids[:100]
        prefilled = await prefill.prefill(tokens, emitted=so_far, **sampling)
        assert prefilled.first.token_ids == whole.token_ids[100:101]
        answer = await decode.decode(tokens, prefilled, emitted=so_far, **sampling)
        assert [*so_far, *answer.token_ids] == whole.token_ids
        if answer.started.handoff != generation.HANDOFF_OUTCOME_PULLED:
            return False
        # To the last token that has KV, from the end of some block.
        assert (len(tokens) + len(so_far) - answer.started.pulled_tokens) % BLOCK_TOKENS == 0
        return True

    # On a busy machine one may take longer than its deadline of a second.
    await until(pulled, "a hand-off is pulled")
    await until(prefill.nothing_held, "the blocks are free")


async def test_blocks_of_another_prompt_are_not_pulled(guarded: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = guarded
    before = (await decode.status()).counters.handoffs_mismatched
    tokens, others = _prompt(9), _prompt(10)
    await _forget(decode)
    answer = await decode.decode(others, await prefill.prefill(tokens))
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert (await decode.status()).counters.handoffs_mismatched == before + 1
    # Its first token is the other prompt's, as the caller wanted it; what follows is computed from the right blocks.
    first, *rest = answer.token_ids
    assert rest == (await decode.decode(others, emitted=[first])).token_ids
    await until(prefill.nothing_held, "the blocks are free")


async def test_a_hand_off_that_waits_too_long_for_its_turn_is_recomputed(
    guarded: tuple[WorkerProcess, WorkerProcess],
) -> None:
    prefill, decode = guarded
    tokens = _prompt(3)
    expected = await _expected(decode, tokens)
    busy = asyncio.create_task(decode.decode([5] * 20, max_tokens=3000))
    await until(lambda: _running(decode), "the decode worker is busy")
    prefilled = await prefill.prefill(tokens)
    waiting = asyncio.create_task(decode.decode(tokens, prefilled))
    await asyncio.sleep(2 * DEADLINE_S)
    busy.cancel()
    answer = await waiting
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert answer.token_ids == expected.token_ids
    assert (await decode.status()).counters.handoffs_expired >= 1


async def test_a_released_hand_off_frees_its_blocks_at_once(guarded: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, _ = guarded
    await until(prefill.nothing_held, "nothing is leased from other tests")
    prefilled = await prefill.prefill(_prompt(4))
    assert (await prefill.status()).load.leased_handoffs == 1
    released = await prefill.stub.ReleaseHandoff(
        wire.ReleaseHandoffRequest(lease_id=prefilled.handoff.lease_id, generation=prefill.generation)
    )
    assert released.released
    await until(prefill.nothing_held, "the blocks are free")


async def test_a_prompt_answered_by_its_first_token_leases_nothing(
    guarded: tuple[WorkerProcess, WorkerProcess],
) -> None:
    prefill, _ = guarded
    await until(prefill.nothing_held, "nothing is leased from other tests")
    tokens = _prompt(5)
    first = (await prefill.prefill(tokens, hand_off=False, max_tokens=1)).first.token_ids[0]
    ended = await prefill.prefill(tokens, stop_token_ids=[first])
    assert ended.finish_reason == generation.FINISH_REASON_STOP
    assert not ended.HasField("handoff")
    await until(prefill.nothing_held, "the blocks are free")


async def test_a_call_for_another_generation_is_refused(guarded: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, _ = guarded
    request = wire.PrefillRequest(request_id="stale", generation=prefill.generation - 1, token_ids=[1])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await prefill.stub.Prefill(request)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_prefill_worker_that_died_before_the_pull_costs_time_but_no_token(
    guarded: tuple[WorkerProcess, WorkerProcess],
) -> None:
    """Last in this module: it ends the prefill worker that the others share."""
    prefill, decode = guarded
    tokens = _prompt(6)
    expected = await _expected(decode, tokens)
    prefilled = await prefill.prefill(tokens)
    prefill.kill()
    answer = await decode.decode(tokens, prefilled)
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    assert answer.token_ids == expected.token_ids
    await until(decode.nothing_held, "the decode worker holds nothing")


async def _forget(worker: WorkerProcess) -> None:
    """Another prompt as long as the pool takes all of the worker's blocks."""
    await worker.decode([3] * 3000, max_tokens=1)


async def _pull_after_lease(
    prefill: WorkerProcess, decode: WorkerProcess, variant: int, *, is_verified: bool = True
) -> tuple[Answer, Answer]:
    """(late answer, right answer): the lease ends and its blocks are overwritten before the decode worker asks."""
    tokens = _prompt(variant)
    expected = await _expected(decode, tokens)
    prefilled = await prefill.prefill(tokens)
    if not is_verified:
        params = json.loads(prefilled.handoff.connector_params)
        prefilled.handoff.connector_params = json.dumps({**params, CHECKSUMS_PARAM: None}).encode()
    await until(prefill.nothing_held, "the lease ended")
    for other in range(3):
        await prefill.prefill(_prompt(100 + 10 * variant + other), hand_off=False, max_tokens=1)
    return await decode.decode(tokens, prefilled), expected


async def _expected(decode: WorkerProcess, tokens: list[int]) -> Answer:
    """What the decode engine answers by itself, with its blocks pushed out of the prefix cache again."""
    expected = await decode.decode(tokens)
    for other in range(4):
        await decode.decode(_prompt(200 + other), max_tokens=1)
    return expected


def _prompt(variant: int) -> list[int]:
    return [(7 * index + 13 * variant + index * index * variant) % 250 for index in range(1000)]


async def _running(worker: WorkerProcess) -> bool:
    return (await worker.status()).load.running_requests > 0
