"""The ceiling: never below a cache that does not know the future, equal to the best of all that could be evicted."""

import os
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prefix_cache.belady import belady
from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.traces import Trace, TraceRequest, read_trace

BLOCK_TOKENS = 4
# A block is named by all the symbols up to and including its own: equal name, equal prefix.
Block = tuple[int, ...]
Prompt = tuple[Block, ...]

published_traces = pytest.mark.skipif("RACHIS_TRACES" not in os.environ, reason="RACHIS_TRACES names no folder")


def prompt(symbols: tuple[int, ...]) -> Prompt:
    return tuple(symbols[: end + 1] for end in range(len(symbols)))


def prompts(most_requests: int, most_blocks: int) -> st.SearchStrategy[list[Prompt]]:
    symbols = st.lists(st.integers(0, 2), min_size=1, max_size=most_blocks).map(tuple)
    return st.lists(symbols.map(prompt), min_size=1, max_size=most_requests)


def trace_of(requests: list[Prompt], last_block_tokens: int = BLOCK_TOKENS) -> Trace:
    numbers: dict[Block, int] = {}
    return Trace(
        "small",
        BLOCK_TOKENS,
        tuple(
            TraceRequest(
                arrival_s=float(now),
                input_tokens=(len(blocks) - 1) * BLOCK_TOKENS + last_block_tokens,
                output_tokens=1,
                hashes=tuple(numbers.setdefault(block, len(numbers)) for block in blocks),
            )
            for now, blocks in enumerate(requests)
        ),
    )


# What a policy knows of a resident block: when it was last used, when it was inserted, when it will be used.
Known = tuple[int, int, float]


def simulated_hits(requests: list[Prompt], capacity: int, worth: Callable[[Known], float]) -> int:
    """A plain cache that evicts, one after the other, the resident leaf of the least worth, the deepest of equals."""
    used: dict[Block, int] = {}
    inserted: dict[Block, int] = {}
    clock = hits = 0
    for now, blocks in enumerate(requests):
        pinned = blocks[:capacity]
        hits += sum(block in used for block in pinned)
        for block in pinned:
            if block not in used:
                if len(used) == capacity:
                    known = {
                        each: (used[each], inserted[each], next_use(requests, each, now))
                        for each in used
                        if each not in pinned and not any(other[:-1] == each for other in used)
                    }
                    victim = min(known, key=lambda each: (worth(known[each]), -len(each)))
                    del used[victim], inserted[victim]
                inserted[block] = clock
            used[block] = clock
            clock += 1
    return hits


def next_use(requests: list[Prompt], block: Block, now: int) -> float:
    return next((later for later in range(now + 1, len(requests)) if block in requests[later]), float("inf"))


def best_hits(requests: list[Prompt], capacity: int) -> int:
    """By trying every set of leaves at every eviction."""

    @cache
    def best(now: int, resident: frozenset[Block]) -> int:
        if now == len(requests):
            return 0
        pinned = frozenset(requests[now][:capacity])
        others = resident - pinned
        kept = min(len(others), capacity - len(pinned))
        return len(resident & pinned) + max(
            best(now + 1, pinned.union(rest))
            for rest in combinations(sorted(others), kept)
            if all(not block[:-1] or block[:-1] in pinned.union(rest) for block in rest)
        )

    return best(0, frozenset())


@given(prompts(8, 4), st.integers(1, 8))
def test_optimum_is_what_evicting_the_farthest_leaf_one_by_one_gives(requests: list[Prompt], capacity: int) -> None:
    farthest = simulated_hits(requests, capacity, lambda known: -known[2])
    assert belady(trace_of(requests), capacity).hit_blocks == farthest


@given(prompts(12, 4), st.integers(1, 10))
def test_optimum_is_at_least_lru_fifo_and_mru(requests: list[Prompt], capacity: int) -> None:
    optimum = belady(trace_of(requests), capacity).hit_blocks
    assert optimum >= simulated_hits(requests, capacity, lambda known: known[0])
    assert optimum >= simulated_hits(requests, capacity, lambda known: known[1])
    assert optimum >= simulated_hits(requests, capacity, lambda known: -known[0])


@given(prompts(6, 3), st.integers(1, 5))
def test_optimum_is_the_best_of_all_choices(requests: list[Prompt], capacity: int) -> None:
    assert belady(trace_of(requests), capacity).hit_blocks == best_hits(requests, capacity)


def test_lru_is_below_the_optimum_where_more_prompts_take_turns_than_fit() -> None:
    turns = [prompt((symbol, symbol)) for symbol in (0, 1, 2)] * 5
    assert simulated_hits(turns, 4, lambda known: known[0]) == 0
    assert belady(trace_of(turns), 4).hit_blocks == best_hits(turns, 4) == 12


@given(prompts(10, 4))
def test_more_room_never_hits_less_and_room_for_all_hits_all_that_was_seen(requests: list[Prompt]) -> None:
    trace = trace_of(requests)
    distinct = {block for blocks in requests for block in blocks}
    hits = [belady(trace, capacity).hit_blocks for capacity in range(1, len(distinct) + 1)]
    assert hits == sorted(hits)
    assert hits[-1] == sum(map(len, requests)) - len(distinct)


@given(prompts(10, 4), st.integers(1, 8), st.integers(1, BLOCK_TOKENS))
def test_hit_tokens_are_the_hit_blocks_capped_at_the_prompt(
    requests: list[Prompt], capacity: int, last_block_tokens: int
) -> None:
    optimum = belady(trace_of(requests, last_block_tokens), capacity)
    assert optimum.blocks == sum(map(len, requests))
    assert optimum.input_tokens == optimum.blocks * BLOCK_TOKENS - len(requests) * (BLOCK_TOKENS - last_block_tokens)
    missing = optimum.hit_blocks * BLOCK_TOKENS - optimum.hit_tokens
    assert missing % max(1, BLOCK_TOKENS - last_block_tokens) == 0
    assert 0 <= missing <= len(requests) * (BLOCK_TOKENS - last_block_tokens)
    assert 0 <= optimum.hit_ratio < 1


def test_partial_last_block_counts_for_its_tokens() -> None:
    optimum = belady(trace_of([prompt((1, 2)), prompt((1, 2))], last_block_tokens=1), 2)
    assert (optimum.hit_blocks, optimum.hit_tokens, optimum.input_tokens) == (2, 5, 10)


def test_prompt_longer_than_the_cache_keeps_its_leading_blocks() -> None:
    assert belady(trace_of([prompt((1, 2, 3, 4))] * 2), 3).hit_blocks == 3


def test_blocks_of_the_request_in_hand_are_not_evicted_for_its_others() -> None:
    requests = [prompt((1,)), prompt((2, 0, 0)), prompt((1,)), prompt((2, 0, 0))]
    assert belady(trace_of(requests), 3).hit_blocks == best_hits(requests, 3) == 2


def test_empty_trace_hits_nothing() -> None:
    assert belady(Trace("empty", BLOCK_TOKENS, ()), 1).hit_ratio == 0


@pytest.mark.parametrize("capacity_blocks", [0, -1])
def test_capacity_below_a_block_is_refused(capacity_blocks: int) -> None:
    with pytest.raises(InvalidInputError, match="capacity_blocks"):
        belady(trace_of([prompt((1,))]), capacity_blocks)


def test_half_the_examples_in_the_cache_serve_more_than_half_of_mmlu() -> None:
    trace = generated(SHAPES["mmlu"], requests=3000)
    ideal = belady(trace, 1 << 20)
    half = belady(trace, 57 * 472 // 16 // 2)
    assert 0.5 * ideal.hit_ratio < half.hit_ratio < ideal.hit_ratio < 472 / 567


@published_traces
def test_published_trace_has_its_known_ceilings() -> None:
    trace = read_trace(Path(os.environ["RACHIS_TRACES"]) / "mooncake_conversation.jsonl")
    ratios = [belady(trace, tokens // 512).hit_ratio for tokens in (2_000_000, 8_000_000)]
    assert ratios == pytest.approx([0.3245, 0.3736], abs=0.0001)
