"""What real engines of both pools tell of their blocks: the stream, the snapshot and the pools always say the same."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from cluster_core.engine_reports import EngineCosts
from kv_transfer.claims.block_events import apply, emit_where_blocks_lie
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import chunk_keys
from kv_transfer.tiers.device_pool import TieredBlockPool, take_over
from kv_transfer.tiers.settings import TierSettings, make_tiers
from tests.engine_process import in_engine_process
from tests.integration.claim_trials import ROUNDS, claim_trials
from worker_runtime.engine_settings import EngineRole

pytestmark = pytest.mark.integration
BLOCKS, BLOCK_TOKENS, CHUNK_BLOCKS = 12, 16, 2
ROOT = 77


@pytest.fixture(scope="module", params=["prefill", "decode"])
def trials(request: pytest.FixtureRequest) -> dict[str, Any]:
    return in_engine_process(claim_trials, EngineRole(request.param))


def test_a_prompts_chunks_are_claimed_by_the_keys_that_routers_find(trials: dict[str, Any]) -> None:
    assert trials["one_prompt"] == {"plain": True, "salted": True, "alike": 0}


def test_the_process_groups_of_an_engine_share_a_device(trials: dict[str, Any]) -> None:
    assert trials["gloo_loops"] == 1


def test_stream_and_pools_agree_under_eviction_copies_and_aborts(trials: dict[str, Any]) -> None:
    """Each audit compares them; here is that there was something to compare."""
    found = trials["random_prompts"]
    assert found["audits"] == ROUNDS
    assert found["removed"] > 30
    assert found["most_host"] >= 4
    assert found["snapshots"] > 3
    assert (found["losses"], found["nameless"], found["foreign"]) == (0, 0, 0)


def test_costs_and_figures_are_measured(trials: dict[str, Any]) -> None:
    """On a busy machine the parts of a prefill's cost cannot always be told apart; their sum can."""
    found = trials["random_prompts"]
    costs = EngineCosts(**found["costs"])
    assert 0 < costs.prefill_s + 200 * costs.prefill_s_per_token + 200 * 100 * costs.prefill_s_per_pair < 5
    assert 0 < costs.decode_step_s < 5
    assert 0 < costs.load_s_per_token < 0.1
    assert found["stored_blocks"] > found["cacheable_requests"] > 30


def test_a_removal_that_is_not_told_is_noticed(trials: dict[str, Any]) -> None:
    assert trials["lost_removals"] == {"noticed": True}


def test_after_a_reset_nothing_is_claimed_and_claims_come_again(trials: dict[str, Any]) -> None:
    assert trials["reset"] == {"left": 0, "again": True}


# vLLM's own block pool, without an engine.


def claims_of_pool() -> ChunkClaims:
    return ChunkClaims(lambda salt, adapter: ROOT, BLOCK_TOKENS, CHUNK_BLOCKS)


def request_of(tokens: list[int]) -> Any:
    """As much of a vLLM request as the pool reads."""
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    hashes = [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in ends]
    return SimpleNamespace(
        block_hashes=hashes,
        all_token_ids=tokens,
        request_id="r",
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        session_id=None,
        sampling_params=None,
    )


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> BlockPool:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    init_none_hash(lambda value: b"")
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS, enable_kv_cache_events=True)


def tiered(pool: BlockPool) -> TieredBlockPool:
    tiers = make_tiers(TierSettings(filter_entries=1024), BLOCKS, 8, lambda block: pool.blocks[block].ref_cnt > 0)
    return take_over(pool, tiers)


def test_a_run_behind_blocks_that_are_published_already_comes_with_its_own_tokens(pool: BlockPool) -> None:
    """vLLM's event for blocks with a mask has the tokens of all of them, and the hashes of some."""
    tokens = [number % 100 for number in range(4 * BLOCK_TOKENS)]
    request, ours = request_of(tokens), tiered(pool)
    ours.cache_full_blocks(request, ours.get_new_blocks(2), 0, 2, BLOCK_TOKENS, 0)
    again = ours.get_new_blocks(4)

    ours.cache_full_blocks(request, again, 0, 4, BLOCK_TOKENS, 0)

    events = ours.take_events()
    assert [(len(event.block_hashes), len(event.token_ids)) for event in events] == [(2, 32), (2, 32)]
    claims = claims_of_pool()
    apply(events, claims, 0)
    assert claims.claims().device == set(chunk_keys(tokens, ROOT, BLOCK_TOKENS * CHUNK_BLOCKS).tolist())


def test_of_two_blocks_with_one_hash_the_first_that_leaves_removes_nothing(pool: BlockPool) -> None:
    request, ours = request_of([1] * 2 * BLOCK_TOKENS), emit_where_blocks_lie(pool)
    first, second = ours.get_new_blocks(2), ours.get_new_blocks(2)
    for blocks in (first, second):
        ours.cache_full_blocks(request, blocks, 0, 2, BLOCK_TOKENS, 0)
    claims = claims_of_pool()

    ours.evict_blocks({block.block_id for block in first})
    apply(ours.take_events(), claims, 0)
    assert len(claims.claims().device) == 1

    ours.evict_blocks({block.block_id for block in second})
    apply(ours.take_events(), claims, 0)
    assert not claims.claims().device


def test_a_block_that_is_copied_and_leaves_the_device_in_one_step_keeps_its_name(pool: BlockPool) -> None:
    request, ours = request_of([3] * 2 * BLOCK_TOKENS), tiered(pool)
    blocks = ours.get_new_blocks(2)
    ours.cache_full_blocks(request, blocks, 0, 2, BLOCK_TOKENS, 0)
    ours.tiers.accessed(request.block_hashes)
    ours.tiers.accessed(request.block_hashes)
    copy = ours.tiers.worth_copying(request.block_hashes)
    assert copy is not None
    ours.tiers.copied_out(copy)
    ours.evict_blocks({block.block_id for block in blocks[1:]})
    claims = claims_of_pool()

    apply(ours.take_events(), claims, 0)

    assert claims.claims().host == set(chunk_keys([3] * 32, ROOT, 32).tolist())
    assert not claims.claims().device
    ours.free_blocks(reversed(blocks))
    assert ours.reset_prefix_cache()
    apply(ours.take_events(), claims, 0)
    assert len(claims) == 0


def test_blocks_that_come_back_are_told_without_tokens_and_claimed(pool: BlockPool) -> None:
    request, ours = request_of([4] * 2 * BLOCK_TOKENS), tiered(pool)
    blocks = ours.get_new_blocks(2)
    ours.cache_full_blocks(request, blocks, 0, 2, BLOCK_TOKENS, 0)
    ours.tiers.accessed(request.block_hashes)
    ours.tiers.accessed(request.block_hashes)
    copy = ours.tiers.worth_copying(request.block_hashes)
    assert copy is not None
    ours.tiers.copied_out(copy)
    ours.evict_blocks({blocks[1].block_id})

    ours.publish(request.block_hashes, 1, ours.get_new_blocks(1))

    claims = claims_of_pool()
    apply(ours.take_events(), claims, 0)
    assert len(claims.claims().device) == len(claims.claims().host) == 1
