"""The offline optimum: what share of a trace's tokens a prefix cache could serve at most, if it knew the future.

Rules of the cache, the same for any policy that is compared with it: a request hits the leading run of its blocks that
are resident; then all its blocks are inserted and pinned until the next request; for room, resident leaves (no resident
child) are evicted. Belady evicts the leaf whose next use is farthest away, those never used again first. Of a prompt
longer than the whole cache, the leading blocks that fit are inserted.

Blocks need not be told apart. Whoever uses a block uses its predecessors too, so that next uses never fall along a
prompt: the deepest of the blocks with the farthest next use is always a leaf, and the resident blocks with next use j
are the leading run that request j will hit. Counting resident blocks by next use is therefore all the state there is.

Evicting so is optimal in blocks (Belady, 1966). Tokens follow, but for the partial blocks at the ends of prompts. A
cache that may compute a prompt without holding all of its blocks is not bound by this ceiling.
"""

import heapq
from collections import Counter
from dataclasses import dataclass

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Optimum:
    """Of all blocks and tokens of the trace's prompts, those that were resident when their request came."""

    hit_blocks: int
    hit_tokens: int
    blocks: int
    input_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Over tokens."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def belady(trace: Trace, capacity_blocks: int) -> Optimum:
    """O(blocks of the trace + requests x log requests). Raises InvalidInputError for a capacity below one block."""
    if capacity_blocks < 1:
        raise InvalidInputError(f"must be at least 1, got {capacity_blocks}", field="capacity_blocks")
    cache = _Cache(capacity_blocks, len(trace.requests))
    hit_blocks = hit_tokens = 0
    for now, next_uses in enumerate(_next_uses(trace.requests, capacity_blocks)):
        hits = cache.use(now, next_uses)
        hit_blocks += hits
        hit_tokens += min(hits * trace.block_tokens, trace.requests[now].input_tokens)
    return Optimum(
        hit_blocks,
        hit_tokens,
        blocks=sum(len(request.hashes) for request in trace.requests),
        input_tokens=sum(request.input_tokens for request in trace.requests),
    )


def _next_uses(requests: tuple[TraceRequest, ...], capacity_blocks: int) -> list[Counter[int]]:
    """For each request, how many of its blocks the cache has room for are next used by which request.

    What is never used again has the number behind the last request.
    """
    never = len(requests)
    next_use: dict[int, int] = {}
    found: list[Counter[int]] = []
    for now in reversed(range(len(requests))):
        blocks = requests[now].hashes[:capacity_blocks]
        found.append(Counter(next_use.get(block, never) for block in blocks))
        next_use.update(dict.fromkeys(blocks, now))
    found.reverse()
    return found


class _Cache:
    """resident[j]: blocks whose next use is request j; behind the last request, those that are never used again."""

    def __init__(self, capacity_blocks: int, requests: int) -> None:
        self._free = capacity_blocks
        self._resident = [0] * (requests + 1)
        # Next uses, negative so that the farthest is on top; each at least as often as it has been inserted.
        self._farthest: list[int] = []

    def use(self, now: int, next_uses: Counter[int]) -> int:
        """Inserts all blocks of request `now`, given by their next use; returns how many were resident."""
        hits = self._resident[now]
        # From here on these are pinned: no longer counted among the evictable, and not free either.
        self._resident[now] = 0
        self._make_room(next_uses.total() - hits)
        for next_use, blocks in next_uses.items():
            self._resident[next_use] += blocks
            heapq.heappush(self._farthest, -next_use)
        return hits

    def _make_room(self, blocks: int) -> None:
        while self._free < blocks:
            # The top is in the future: a request has no more blocks than the cache, so something else is resident.
            next_use = -self._farthest[0]
            evicted = min(self._resident[next_use], blocks - self._free)
            self._resident[next_use] -= evicted
            self._free += evicted
            if not self._resident[next_use]:
                heapq.heappop(self._farthest)
        self._free -= blocks
