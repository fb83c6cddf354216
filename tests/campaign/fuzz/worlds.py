"""The settings of simulated worlds, drawn from a seed."""

import random
from dataclasses import dataclass, replace
from typing import Any

from cluster_core.engine_jobs import NOBODY, TenantShare
from decode_worker.batch_settings import BatchSettings
from decode_worker.engine_scheduler import AsyncDecodeScheduler, DecodeScheduler
from prefill_worker.engine_scheduler import AsyncStreamingScheduler, StreamingScheduler
from prefill_worker.policies import BOUND_PARTIAL, POLICIES
from shared_worker.engine_scheduler import AsyncSharedScheduler, SharedScheduler

_HOST_RICH: dict[str, Any] = {
    "loads": 0.0, "token_budget": 24, "host_slots": 80, "admission": "everything", "requests": 20,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class World:
    """One setting of the simulation.

    depth: engine steps in flight; above 1 the asynchronous scheduler. loads: share of all prompts whose beginning comes
    from elsewhere. consumer: whether the connector may receive KV, which makes vLLM free blocks later. tiers: without
    them the order of eviction is vLLM's own, and host memory is for swapped sessions only. decode: settings of a decode
    scheduler, which has no sessions; None: a streaming one.
    """

    v2: bool = False
    depth: int = 1
    policy: str = "fcfs"
    preemption: str = "swap"
    starvation_s: float = 0.2
    blocks: int = 30
    host_slots: int = 24
    places: int = 6
    token_budget: int = 96
    sessions: int = 30
    requests: int = 6
    loads: float = 0.0
    consumer: bool = True
    tiers: bool = True
    eviction: str = "rachis"
    admission: str = "selective"
    frequency_threshold: int = 2
    decode: BatchSettings | None = None
    # How many there are, and how many of them a step may compute; 0: none.
    adapters: int = 0
    adapters_in_step: int = 1
    # The streaming scheduler knows how fast its engine is.
    is_measured: bool = False
    # Clients say who goes first.
    has_priorities: bool = False
    # How many tenants there are; 0: nobody says whose a request is.
    tenants: int = 0
    # Of a scheduler that does both; with `decode`.
    is_shared: bool = False
    # Objectives of a scheduler that decodes; 0: its steps are not bounded.
    tpot_s: float = 0.0
    # None: that of the others.
    best_effort_tpot_s: float | None = None
    ttft_s: float = 5.0
    # Likewise.
    best_effort_ttft_s: float | None = None
    # What a copy of a block in the background is said to take: from it follows which loads are asynchronous.
    copy_s: float = 0.0
    promotion: bool = True
    # What has landed is looked for before each step, too.
    looks: bool = False

    @classmethod
    def drawn(cls, rng: random.Random) -> "World":
        world = cls(
            v2=rng.random() < 0.5,
            depth=rng.choice((1, 2)),
            policy=rng.choice(list(POLICIES)),
            preemption=rng.choice(("recompute", "swap", "swap", "cost")),
            starvation_s=rng.choice((0.02, 0.2, 2.0)),
            blocks=rng.choice((16, 24, 30, 40, 60)),
            host_slots=rng.choice((0, 5, 24, 80)),
            places=rng.choice((2, 4, 6, 12)),
            token_budget=rng.choice((24, 96, 200)),
            requests=rng.choice((0, 6, 20)),
            loads=rng.choice((0.0, 0.0, 0.3)),
            consumer=rng.random() < 0.7,
            eviction=rng.choice(("rachis", "rachis", "hotprefix", "lru", "lfu", "fifo", "2q")),
            admission=rng.choice(("none", "everything", "selective")),
            frequency_threshold=rng.choice((1, 2, 3)),
        )
        world = replace(
            world,
            is_measured=world.policy in BOUND_PARTIAL and world.starvation_s < 1.0,
            has_priorities=world.places == 12,
        )
        # Prefixes in host memory that are longer than a step, beside idle sessions on a device that is full.
        is_host_rich = rng.random() < 0.15
        world = replace(world, **_HOST_RICH) if is_host_rich else with_adapters(world, rng)
        return with_copies(with_tenants(world, rng), rng)

    @property
    def scheduler_class(self) -> type:
        if self.is_shared:
            return AsyncSharedScheduler if self.depth > 1 else SharedScheduler
        if self.decode is not None:
            return AsyncDecodeScheduler if self.depth > 1 else DecodeScheduler
        return AsyncStreamingScheduler if self.depth > 1 else StreamingScheduler


def share_of(number: int) -> TenantShare:
    """Of a tenant, the first of which has number 1; 0: nobody."""
    return TenantShare(f"tenant {number}", (0.0, 3.0, 0.02, 1.0)[number % 4]) if number else NOBODY


def with_tenants(world: World, rng: random.Random) -> World:
    return replace(world, tenants=rng.choice((0, 0, 1, 3, 5)))


def with_copies(world: World, rng: random.Random) -> World:
    copy_s, looks = rng.choice(((0.0, False), (0.02, False), (0.02, True)))
    return replace(world, copy_s=copy_s, looks=looks)


def with_adapters(world: World, rng: random.Random) -> World:
    return replace(world, adapters=rng.choice((0, 0, 2, 3)), adapters_in_step=rng.choice((1, 2)))
