"""Replays against a plain cache of leaves, the infinite cache and the optimum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prefix_cache.belady import belady
from benchmarks.prefix_cache.replay import RECIPES, Replay, replay
from cluster_configs.schema import TiersSection
from cluster_sim.workloads.traces import Trace, TraceRequest, full_blocks_only
from kv_transfer.blocks import Tier
from kv_transfer.tiers.eviction_policies import LeastRecentlyUsed
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.radix_tree import RadixTree
from kv_transfer.tiers.settings import TierSettings
from kv_transfer.tiers.tier_terms import Admission
from tests.examples import examples
from tests.planting import planted
from tests.pure.kv_transfer.tiers.test_radix_tree import Prefix, hashes_of

BLOCK_TOKENS = 4
PROMPTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7).map(tuple), min_size=1, max_size=30)


def trace_of(prompts: list[Prefix]) -> Trace:
    """All blocks are full."""
    requests = (
        TraceRequest(float(now), len(each) * BLOCK_TOKENS, 1, tuple(hashes_of(each)))
        for now, each in enumerate(prompts)
    )
    return Trace("small", BLOCK_TOKENS, tuple(requests))


def hit_blocks(trace: Trace, ratio: float) -> int:
    return round(ratio * sum(len(request.hashes) for request in trace.requests))


def lru_hits(prompts: list[Prefix], capacity: int) -> int:
    """A plain cache that evicts the leaf used least recently; of a longer prompt it keeps what fits."""
    used: dict[Prefix, int] = {}
    hits = 0
    for now, prompt in enumerate(prompts):
        blocks = [prompt[: end + 1] for end in range(len(prompt))]
        hit = next((index for index, block in enumerate(blocks) if block not in used), len(blocks))
        hits += hit
        used.update(dict.fromkeys(blocks[:hit], now))
        for block in blocks[hit:]:
            if len(used) == capacity:
                leaves = [each for each in used if not any(other[:-1] == each for other in used) and used[each] < now]
                if not leaves:
                    break
                del used[min(leaves, key=lambda each: used[each])]
            used[block] = now
    return hits


def infinite_hits(prompts: list[Prefix]) -> int:
    seen: set[Prefix] = set()
    hits = 0
    for prompt in prompts:
        blocks = {prompt[: end + 1] for end in range(len(prompt))}
        hits += len(blocks & seen)
        seen |= blocks
    return hits


@given(PROMPTS, st.integers(1, 12))
def test_lru_replay_is_a_plain_cache_of_leaves(prompts: list[Prefix], capacity: int) -> None:
    trace = trace_of(prompts)
    assert hit_blocks(trace, replay(trace, "lru", capacity, 0).hit_ratio) == lru_hits(prompts, capacity)


@pytest.mark.parametrize("name", RECIPES)
@given(PROMPTS, st.integers(1, 12))
@examples(50, few=3)
def test_no_policy_hits_more_than_the_optimum_in_one_tier(name: str, prompts: list[Prefix], capacity: int) -> None:
    trace = trace_of(prompts)
    hits = hit_blocks(trace, replay(trace, name, capacity, 0).hit_ratio)
    assert hits <= belady(trace, capacity).hit_blocks <= infinite_hits(prompts)


@pytest.mark.parametrize("name", RECIPES)
@given(PROMPTS, st.integers(1, 8), st.integers(0, 8))
@examples(100, few=5)
def test_hits_of_the_tiers_add_up_and_nothing_is_lost(
    name: str, prompts: list[Prefix], device_blocks: int, host_blocks: int
) -> None:
    trace = trace_of(prompts)
    cache = Replay(RECIPES[name], device_blocks, host_blocks)
    found = cache.run(trace, lambda: check(cache))
    assert found.hit_ratio == pytest.approx(found.device_hit_ratio + found.host_hit_ratio)
    assert hit_blocks(trace, found.hit_ratio) <= infinite_hits(prompts)
    if not host_blocks or RECIPES[name].settings.rules.admission is Admission.NONE:
        assert found.host_hit_ratio == found.blocks_copied == found.blocks_promoted == 0


def check(cache: Replay) -> None:
    """Between two requests the tree alone refers to blocks and slots."""
    cache.tiers.check_invariants()
    cache.device.check_invariants()
    for tier, memory in ((Tier.DEVICE, cache.device), (Tier.HOST, cache.tiers.slots)):
        there = {identity for identity, _ in cache.tiers.tree.items(tier)}
        assert [memory.count(each) for each in range(memory.size)] == [each in there for each in range(memory.size)]
        assert memory.free == memory.size - len(there)


@pytest.mark.parametrize("name", RECIPES)
def test_a_prompt_longer_than_the_cache_hits_what_of_it_fits(name: str) -> None:
    long = (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
    found = replay(trace_of([long, long]), name, 4, 0)
    assert hit_blocks(trace_of([long, long]), found.device_hit_ratio) == 4


def test_host_memory_serves_what_the_device_had_no_room_for() -> None:
    first, second = (1, 1, 1), (2, 2, 2)
    trace = trace_of([first, second, first, second])
    found = replay(trace, "lru", 3, 6)
    assert (hit_blocks(trace, found.device_hit_ratio), hit_blocks(trace, found.host_hit_ratio)) == (0, 6)
    assert (found.blocks_copied_out, found.blocks_copied_back) == (6, 6)


def test_an_unused_tail_of_a_block_is_no_hit() -> None:
    requests = tuple(TraceRequest(float(now), 5, 1, (1, 2)) for now in range(2))
    assert replay(Trace("partial", BLOCK_TOKENS, requests), "lru", 4, 0).hit_ratio == 0.5


# Two prompts with a partial block, two more that need room, and the first again.
PARTIAL = Trace(
    "partial",
    BLOCK_TOKENS,
    tuple(
        TraceRequest(0.0, tokens, 1, hashes)
        for tokens, hashes in [(10, (1, 2, 3)), (10, (4, 5, 6)), (4, (7,)), (4, (8,)), (8, (1, 2))]
    ),
)


@pytest.mark.parametrize(("name", "hit_tokens"), [("rachis", 8), ("lru", 4)])
def test_the_score_hears_of_full_blocks_only_and_gives_up_partial_ones_first(name: str, hit_tokens: int) -> None:
    assert replay(PARTIAL, name, 6, 0).hit_ratio == pytest.approx(hit_tokens / 36)


@pytest.mark.parametrize("name", RECIPES)
def test_without_partial_blocks_in_the_trace_there_is_room_for_the_others(name: str) -> None:
    assert replay(full_blocks_only(PARTIAL).read(), name, 6, 0).hit_ratio == pytest.approx(8 / 36)


def test_what_runs_by_default_is_what_is_replayed() -> None:
    configured = TierSettings.of(TiersSection().model_dump(exclude={"host_gib", "host_ratio"}))
    assert RECIPES["rachis"].settings == configured


def test_an_empty_trace_hits_nothing() -> None:
    assert replay(trace_of([]), "lru", 4, 4).hit_ratio == 0


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        replay(trace_of([]), "nonsense", 4, 0)


def test_the_comparison_sees_an_order_that_is_not_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(
        monkeypatch,
        LeastRecentlyUsed,
        "priority",
        lambda self, block_hash, length_blocks: -self._last.get(block_hash, 0),
    )
    prompts: list[Prefix] = [(1,), (2,), (3,), (2,)]
    assert hit_blocks(trace_of(prompts), replay(trace_of(prompts), "lru", 2, 0).hit_ratio) != lru_hits(prompts, 2)


def test_the_comparison_sees_a_match_that_rounds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    common_blocks = Node.common_blocks
    planted(
        monkeypatch,
        Node,
        "common_blocks",
        lambda run, hashes, at: min(common_blocks(run, hashes, at) + 1, len(run.hashes), len(hashes) - at),
    )
    prompts: list[Prefix] = [(1, 1, 1), (1, 2, 1)]
    assert hit_blocks(trace_of(prompts), replay(trace_of(prompts), "lru", 9, 0).hit_ratio) > infinite_hits(prompts)


def test_the_check_sees_a_block_that_was_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, RadixTree, "remove", lambda tree, tier, identity: [])
    cache = Replay(RECIPES["lru"].with_host_of(0), 2, 0)
    with pytest.raises(AssertionError):
        cache.run(trace_of([(1, 1), (2, 2)]), lambda: check(cache))
