"""What a tenant that floods the cache costs one with hot prefixes, with shares of the tiers and without: hits, counted.

One tenant asks for a few prefixes again and again, each time with an end of its own. Between two of its requests the
other sends prompts that nobody has sent before; `repeats` of each, one after the other, so that they look hot as well.
There is no engine and no time in it: requests run one by one through the classes of a worker.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.prefix_cache.replay import RECIPES, Replay
from cluster_core.engine_jobs import TenantShare
from cluster_sim.workloads.traces import TraceRequest

BLOCK_TOKENS = 16
HOT, FLOODING = TenantShare("hot"), TenantShare("flooding")


@dataclass(frozen=True, slots=True)
class Flood:
    """Sizes in blocks."""

    requests: int = 500
    prefixes: int = 8
    prefix_blocks: int = 32
    own_blocks: int = 8
    # Prompts of the other tenant for each of the first, and how often each is sent.
    flood_prompts: int = 10
    repeats: int = 1
    device_blocks: int = 1000
    host_blocks: int = 0

    def prompts(self, seed: int) -> Iterator[tuple[TenantShare, TraceRequest]]:
        rng, numbers = random.Random(seed), count(1)
        hot = [[next(numbers) for _ in range(self.prefix_blocks)] for _ in range(self.prefixes)]
        for _ in range(self.requests):
            own = [next(numbers) for _ in range(self.own_blocks)]
            yield HOT, _request([*rng.choice(hot), *own])
            for _ in range(self.flood_prompts):
                prompt = _request([next(numbers) for _ in range(self.prefix_blocks + self.own_blocks)])
                for _ in range(self.repeats):
                    yield FLOODING, prompt


def hit_ratio(flood: Flood, policy: str, turnovers: int, seed: int = 0) -> float:
    """Of the tokens of the first tenant's prompts, with shares that are kept for so many turnovers; 0: with none."""
    recipe = RECIPES[policy]
    recipe = replace(recipe, settings=replace(recipe.settings, tenant_turnovers=turnovers))
    cache = Replay(recipe.with_host_of(flood.host_blocks), flood.device_blocks, flood.host_blocks)
    asked = hit = 0
    for tenant, request in flood.prompts(seed):
        found = cache.serve(request, BLOCK_TOKENS, tenant)
        if tenant is HOT:
            asked += request.input_tokens
            hit += found
    cache.tiers.check_invariants()
    return hit / asked


def _request(hashes: list[int]) -> TraceRequest:
    return TraceRequest(0.0, len(hashes) * BLOCK_TOKENS, 1, tuple(hashes))
