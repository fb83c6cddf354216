"""vLLM's own block pool in the order of the tiers, against a plain model, without an engine.

Requests find what is cached, take blocks for the rest, publish them and give them back, in any order.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.core.block_pool import BlockPool

from cluster_core.engine_jobs import NOBODY, TENANT_ARG, TenantShare
from kv_transfer.blocks import Tier
from kv_transfer.tiers import device_pool
from kv_transfer.tiers.device_pool import TieredBlockPool, TieredFreeQueue, take_over
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.settings import POLICIES, TierSettings, make_tiers
from tests.planting import planted
from tests.state_machines import expect_noticed

pytestmark = pytest.mark.integration
BLOCKS, BLOCK_SIZE = 9, 16
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple)
TENANTS = st.sampled_from([NOBODY, TenantShare("a"), TenantShare("b", 2.0)])


def hash_of(prefix: tuple[int, ...]) -> bytes:
    return bytes(prefix).rjust(32, b"\0")


@dataclass(eq=False)
class Running:
    prompt: tuple[int, ...]
    blocks: list[Any] = field(default_factory=list)
    published: int = 0
    tenant: TenantShare = NOBODY

    @property
    def hashes(self) -> list[bytes]:
        return [hash_of(self.prompt[: end + 1]) for end in range(len(self.prompt))]


def told_of(request: Running) -> Any:
    """As much of a vLLM request as the pool reads."""
    arguments = SimpleNamespace(extra_args={TENANT_ARG: request.tenant})
    return SimpleNamespace(block_hashes=request.hashes, request_id="r", sampling_params=arguments)


class PoolMachine(RuleBasedStateMachine):
    """`contents`: whose KV a block holds; None: nobody can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: TieredBlockPool
        self.tiers: PrefixTiers
        self.running: list[Running] = []
        self.contents: list[bytes | None] = [None] * BLOCKS

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def make(self, policy: str) -> None:
        pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)
        settings_ = TierSettings(eviction=policy, filter_entries=1024, requests_per_epoch=2, lifetime_requests=4)
        self.tiers = make_tiers(settings_, BLOCKS, 0, lambda block: pool.blocks[block].ref_cnt > 0)
        self.pool = take_over(pool, self.tiers)

    @rule(prompt=PROMPTS, tenant=TENANTS)
    def begin(self, prompt: tuple[int, ...], tenant: TenantShare) -> None:
        request = Running(prompt, tenant=tenant)
        self.tiers.comes(request.hashes)
        self.tiers.accessed(request.hashes, tenant=tenant)
        found: list[Any] = []
        for block_hash in request.hashes:
            cached = self.pool.get_cached_block(block_hash, [0])
            if cached is None:
                break
            found += cached
        # vLLM may find more: what lost its parent, which has been computed again since.
        match = self.tiers.match(request.hashes).device
        assert [block.block_id for block in found[: len(match)]] == match
        assert all(self.contents[each.block_id] == name for each, name in zip(found, request.hashes, strict=False)), (
            "a hit with somebody else's KV"
        )
        self.pool.touch(found)
        if len(prompt) - len(found) > self.pool.get_num_free_blocks():
            self.pool.free_blocks(reversed(found))
            return
        taken = self.pool.get_new_blocks(len(prompt) - len(found))
        for block in taken:
            assert block.block_hash is None
            assert block.ref_cnt == 1, "a block of somebody else's"
            self.contents[block.block_id] = None
        request.blocks = [*found, *taken]
        request.published = len(found)
        self.running.append(request)

    @rule(data=st.data(), count=st.integers(1, 6))
    def publish(self, data: st.DataObject, count: int) -> None:
        if not self.running:
            return
        request = data.draw(st.sampled_from(self.running))
        end = min(len(request.prompt), request.published + count)
        for block, name in zip(
            request.blocks[request.published : end], request.hashes[request.published :], strict=False
        ):
            self.contents[block.block_id] = name
        self.pool.cache_full_blocks(
            told_of(request),
            request.blocks, request.published, end, BLOCK_SIZE, 0,
        )  # fmt: skip
        request.published = end

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            request = data.draw(st.sampled_from(self.running))
            self.running.remove(request)
            self.pool.free_blocks(reversed(request.blocks))

    @rule(prompt=PROMPTS)
    def land(self, prompt: tuple[int, ...]) -> None:
        """Blocks from elsewhere: a promotion that has landed, perhaps after somebody computed the same."""
        request = Running(prompt)
        match = self.tiers.match(request.hashes).device
        first = max(0, len(match) - 1)
        parents = [self.pool.blocks[each] for each in match[:first]]
        self.pool.touch(parents)
        wanted = len(prompt) - first
        if wanted <= self.pool.get_num_free_blocks():
            taken = self.pool.get_new_blocks(wanted)
            for block, name in zip(taken, request.hashes[first:], strict=True):
                self.contents[block.block_id] = name
            before = {name: self.pool.get_cached_block(name, [0]) for name in request.hashes[first:]}
            new = self.pool.publish(request.hashes, first, taken)
            assert new == [name for name, cached in before.items() if cached is None]
            self.pool.free_blocks(reversed(taken))
        self.pool.free_blocks(reversed(parents))

    @rule(block=st.integers(1, BLOCKS - 1))
    def unpublish(self, block: int) -> None:
        """As vLLM does with blocks whose KV did not arrive."""
        self.pool.evict_blocks({block})

    @rule()
    def reset(self) -> None:
        done = self.pool.reset_prefix_cache()
        assert done is (not self.running)
        if done:
            assert self.tiers.tree.nodes == 0

    @invariant()
    def the_tree_the_pool_and_the_requests_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        held = [block.block_id for request in self.running for block in request.blocks]
        assert [block.ref_cnt for block in self.pool.blocks[1:]] == [held.count(each) for each in range(1, BLOCKS)]
        assert self.pool.get_num_free_blocks() == BLOCKS - 1 - len(set(held))
        for block, name in self.tiers.tree.items(Tier.DEVICE):
            assert self.contents[block] == name, "published with somebody else's KV"
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert sorted(block.block_id for block in free) == sorted(set(range(1, BLOCKS)) - set(held))


logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.ERROR)


def test_free_blocks_behind_one_that_is_held_go_last_and_the_deepest_first() -> None:
    """Two requests compute the same prompt at once: what the second published hangs behind the blocks of the first."""
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)
    tiers = make_tiers(TierSettings(), BLOCKS, 0, lambda block: pool.blocks[block].ref_cnt > 0)
    tiered = take_over(pool, tiers)
    first, second = Running((1, 1, 1)), Running((1, 1, 1, 1))
    for request in (first, second):
        tiers.accessed(request.hashes)
        request.blocks = tiered.get_new_blocks(len(request.prompt))
        tiered.cache_full_blocks(told_of(request), request.blocks, 0, len(request.prompt), BLOCK_SIZE, 0)
    tiered.free_blocks(reversed(first.blocks))
    assert tiers.coldest_device_block() is None, "what follows is held"
    [last] = tiered.get_new_blocks(1)
    rest = tiered.get_new_blocks(tiered.get_num_free_blocks())
    assert last not in first.blocks, "the one that was never used"
    assert rest == [first.blocks[2], first.blocks[1], first.blocks[0]]
    tiered.check_invariants()


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
test_pool_gives_no_block_to_two_and_finds_what_it_keeps = PoolMachine.TestCase


def _forgets_to_tell(self: TieredBlockPool, block: Any) -> list[Any]:
    removed: list[Any] = BlockPool._remove_cached_block_hashes(self, block)
    return removed


def _still_counts_what_is_taken(self: TieredFreeQueue, block: Any) -> None:
    self._pile.pop(block.block_id, None)


def _publishes_twice(self: TieredBlockPool, block_hash: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (TieredBlockPool, "_remove_cached_block_hashes", _forgets_to_tell),
        (TieredFreeQueue, "remove", _still_counts_what_is_taken),
        (TieredBlockPool, "_is_published", _publishes_twice),
        (device_pool.TieredBlockPool, "_count_on", lambda self, hashes, first, blocks, new: []),
    ],
)
def test_machine_sees_planted_bugs(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]
) -> None:
    planted(monkeypatch, owner, name, wrong)
    expect_noticed(PoolMachine)
