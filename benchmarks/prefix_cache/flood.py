"""What other tenants cost those with hot prefixes, with shares of the tiers and without: hits, counted.

    Flood      one tenant asks for a few prefixes again and again; between two of its requests another one sends prompts
               that nobody has sent before, `repeats` of each one after the other, so that they look hot as well
    Chats      as Flood, but the first tenant has conversations: each of its prompts goes on from an earlier one
    Visitors   three tenants ask for prefixes that fill the cache; others come once, send a few prompts and go

There is no engine and no time in it: requests run one by one through the classes of a worker.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from benchmarks.prefix_cache.replay import RECIPES, Replay
from cluster_core.engine_jobs import TenantShare
from cluster_sim.workloads.traces import TraceRequest

BLOCK_TOKENS = 16
HOT, FLOODING = TenantShare("hot"), TenantShare("flooding")
_REGULARS = tuple(TenantShare(f"regular {number}") for number in range(3))
_PROMPTS_OF_A_VISITOR = 10


class Scene(Protocol):
    """Sizes in blocks."""

    @property
    def device_blocks(self) -> int: ...

    @property
    def host_blocks(self) -> int: ...

    def prompts(self, seed: int) -> Iterator[tuple[TenantShare, TraceRequest, bool]]:
        """Whose, what, and whether its hits are counted."""


@dataclass(frozen=True, slots=True)
class Flood:
    requests: int = 300
    prefixes: int = 8
    prefix_blocks: int = 32
    own_blocks: int = 8
    # Prompts of the other tenant for each of the first, and how often each is sent.
    flood_prompts: int = 10
    repeats: int = 1
    device_blocks: int = 1000
    host_blocks: int = 0

    def prompts(self, seed: int) -> Iterator[tuple[TenantShare, TraceRequest, bool]]:
        rng, numbers = random.Random(seed), count(1)
        hot = [_take(numbers, self.prefix_blocks) for _ in range(self.prefixes)]
        for _ in range(self.requests):
            yield HOT, _request([*rng.choice(hot), *_take(numbers, self.own_blocks)]), True
            for _ in range(self.flood_prompts):
                prompt = _request(_take(numbers, self.prefix_blocks + self.own_blocks))
                for _ in range(self.repeats):
                    yield FLOODING, prompt, False


@dataclass(frozen=True, slots=True)
class Chats:
    requests: int = 300
    # At once; one that has had all its turns begins anew.
    chats: int = 6
    turns: int = 4
    turn_blocks: int = 4
    # What all chats begin with.
    system_blocks: int = 0
    flood_prompts: int = 2
    flood_blocks: int = 8
    repeats: int = 3
    device_blocks: int = 200
    host_blocks: int = 0

    def prompts(self, seed: int) -> Iterator[tuple[TenantShare, TraceRequest, bool]]:
        rng, numbers = random.Random(seed), count(1)
        system = _take(numbers, self.system_blocks)
        most = self.system_blocks + self.turns * self.turn_blocks
        chats = [system] * self.chats
        for _ in range(self.requests):
            chat = rng.randrange(self.chats)
            before = chats[chat] if len(chats[chat]) < most else system
            chats[chat] = [*before, *_take(numbers, self.turn_blocks)]
            yield HOT, _request(chats[chat]), True
            for _ in range(self.flood_prompts):
                prompt = _request(_take(numbers, self.flood_blocks))
                for _ in range(self.repeats):
                    yield FLOODING, prompt, False


@dataclass(frozen=True, slots=True)
class Visitors:
    requests: int = 1200
    # Of all requests, those of visitors.
    share: float = 0.1
    # Of each regular tenant.
    prefixes: int = 10
    prefix_blocks: int = 32
    own_blocks: int = 8
    device_blocks: int = 1000
    host_blocks: int = 0

    def prompts(self, seed: int) -> Iterator[tuple[TenantShare, TraceRequest, bool]]:
        rng, numbers, visits = random.Random(seed), count(1), count()
        hot = {tenant: [_take(numbers, self.prefix_blocks) for _ in range(self.prefixes)] for tenant in _REGULARS}
        for _ in range(self.requests):
            if rng.random() < self.share:
                visitor = TenantShare(f"visitor {next(visits) // _PROMPTS_OF_A_VISITOR}")
                yield visitor, _request(_take(numbers, self.prefix_blocks + self.own_blocks)), False
            else:
                tenant = rng.choice(_REGULARS)
                yield tenant, _request([*rng.choice(hot[tenant]), *_take(numbers, self.own_blocks)]), True


def hit_ratio(scene: Scene, policy: str, turnovers: int, seed: int = 0) -> float:
    """Of the tokens of the prompts that count, with shares that are kept for so many turnovers; 0: with none."""
    recipe = RECIPES[policy]
    recipe = replace(recipe, settings=replace(recipe.settings, tenant_turnovers=turnovers))
    cache = Replay(recipe.with_host_of(scene.host_blocks), scene.device_blocks, scene.host_blocks)
    asked = hit = 0
    for tenant, request, counts in scene.prompts(seed):
        found = cache.serve(request, BLOCK_TOKENS, tenant)
        if counts:
            asked += request.input_tokens
            hit += found
    cache.tiers.check_invariants()
    return hit / asked


def _take(numbers: Iterator[int], blocks: int) -> list[int]:
    return [next(numbers) for _ in range(blocks)]


def _request(hashes: list[int]) -> TraceRequest:
    return TraceRequest(0.0, len(hashes) * BLOCK_TOKENS, 1, tuple(hashes))


if __name__ == "__main__":
    scenes: list[Scene] = [Flood(), Flood(repeats=3), Flood(repeats=3, host_blocks=1000)]
    scenes += [Visitors(), Visitors(share=0.4), Chats(), Chats(turns=12, turn_blocks=1), Chats(flood_prompts=6)]
    scenes += [Chats(system_blocks=8), Chats(flood_prompts=0), Chats(turns=12, turn_blocks=1, flood_prompts=0)]
    for scene in scenes:
        for policy in ("rachis", "lru", "lfu", "2q", "hotprefix"):
            without, shared = hit_ratio(scene, policy, 0), hit_ratio(scene, policy, 4)
            print(f"{scene} {policy:9} {without:.3f} {shared:.3f}", flush=True)
