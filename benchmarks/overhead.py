"""What router and hand-off add to a request, over the same engines called directly.

Two comparisons, both sides in the same run, in short rounds that alternate which side goes first:

    router     one token:    client -> router -> prefill worker    against   client -> prefill worker
    hand-off   many tokens:  client -> router -> prefill -> NIXL -> decode worker
                                                                   against   client -> decode worker, which prefills too

A figure is the difference between the two sides at the same quantile of whole-request latency, in milliseconds. The
router's own clock (`router_own_*`) says how much of it was spent inside the router process.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rachis.v1 import worker_pb2 as wire

from benchmarks.direct_call import DirectWorker
from cluster_core.clock import monotonic_s
from control_plane.client import RachisClient, token_prompt

PROMPT_TOKENS = 64
HANDOFF_PROMPT_TOKENS = 512
HANDOFF_NEW_TOKENS = 8
# Requests of each kind before anything counts: Ray is still busy with itself when the service is up.
WARM_UP = 60
CONCURRENCIES = (1, 8)
# One-token requests are short and their difference small: more of them for the same time.
ROUTER_FACTOR = 4
# Requests of a round, as a multiple of the concurrency.
ROUND_FACTOR = 5

Send = Callable[[list[int]], Awaitable[object]]


@dataclass(slots=True)
class Sides:
    """Latencies in milliseconds of the two sides of one comparison."""

    cluster_ms: list[float] = field(default_factory=list)
    direct_ms: list[float] = field(default_factory=list)

    def added_ms(self, share: float) -> float:
        return float(np.quantile(self.cluster_ms, share) - np.quantile(self.direct_ms, share))


@dataclass(slots=True)
class Measured:
    """One concurrency."""

    router: Sides
    handoff: Sides
    router_cpu_s: float
    router_requests: int
    router_wall_s: float

    def table(self) -> dict[str, float]:
        rps = self.router_requests / self.router_wall_s
        return {
            "router_p50_ms": round(self.router.added_ms(0.5), 3),
            "router_p99_ms": round(self.router.added_ms(0.99), 3),
            "handoff_p50_ms": round(self.handoff.added_ms(0.5), 3),
            "handoff_p99_ms": round(self.handoff.added_ms(0.99), 3),
            "direct_one_token_p50_ms": round(float(np.quantile(self.router.direct_ms, 0.5)), 3),
            "direct_whole_p50_ms": round(float(np.quantile(self.handoff.direct_ms, 0.5)), 3),
            "requests_per_s": round(rps, 2),
            "cores_per_100_rps": round(self.router_cpu_s / self.router_wall_s / rps * 100, 3),
        }


class OverheadBenchmark:
    """Runs against one service. `on_done` is called after every request."""

    def __init__(self, cluster: RachisClient, on_done: Callable[[], None], seed: int = 0) -> None:
        self._cluster = cluster
        self._on_done = on_done
        self._rng = random.Random(seed)

    async def run(self, requests: int) -> dict[int, Measured]:
        views = {view.registration.pool: view.registration for view in await self._cluster.workers()}
        prefill, decode = (_direct(views[pool]) for pool in (wire.POOL_PREFILL, wire.POOL_DECODE))
        vocabulary = views[wire.POOL_DECODE].model.vocabulary_size
        try:
            await self._measure(WARM_UP, 1, prefill, decode, vocabulary)
            return {each: await self._measure(requests, each, prefill, decode, vocabulary) for each in CONCURRENCIES}
        finally:
            await prefill.close()
            await decode.close()

    async def _measure(
        self, requests: int, concurrency: int, prefill: DirectWorker, decode: DirectWorker, vocabulary: int
    ) -> Measured:
        whole: dict[str, Any] = {"max_tokens": HANDOFF_NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        before, started_s = await self._cluster.router_status(), monotonic_s()
        router = await self._compare(
            ROUTER_FACTOR * requests,
            concurrency,
            PROMPT_TOKENS,
            vocabulary,
            lambda tokens: self._cluster.generate(token_prompt(tokens), max_tokens=1, temperature=0.0),
            prefill.first_token,
        )
        handoff = await self._compare(
            requests,
            concurrency,
            HANDOFF_PROMPT_TOKENS,
            vocabulary,
            lambda tokens: self._cluster.generate(token_prompt(tokens), **whole),
            lambda tokens: decode.decode(tokens, whole),
        )
        wall_s, after = monotonic_s() - started_s, await self._cluster.router_status()
        sent = len(router.cluster_ms) + len(handoff.cluster_ms)
        return Measured(router, handoff, after.cpu_s - before.cpu_s, sent, wall_s)

    async def _compare(
        self, requests: int, concurrency: int, length: int, vocabulary: int, cluster: Send, direct: Send
    ) -> Sides:
        """Rounds of one side after the other, so that they never run at once; no prompt is sent twice."""
        sides = Sides()
        rounds = max(1, requests // (ROUND_FACTOR * concurrency))
        for turn in range(rounds):
            first = turn * requests // rounds
            size = (turn + 1) * requests // rounds - first
            order = ((cluster, sides.cluster_ms), (direct, sides.direct_ms))
            for send, latencies_ms in order if turn % 2 else reversed(order):
                prompts = [[self._rng.randrange(vocabulary) for _ in range(length)] for _ in range(size)]
                latencies_ms += await self._round(prompts, concurrency, send)
        return sides

    async def _round(self, prompts: list[list[int]], concurrency: int, send: Send) -> list[float]:
        slots = asyncio.Semaphore(concurrency)
        latencies_ms: list[float] = []

        async def one(tokens: list[int]) -> None:
            async with slots:
                began_s = monotonic_s()
                await send(tokens)
                latencies_ms.append((monotonic_s() - began_s) * 1000)
            self._on_done()

        async with asyncio.TaskGroup() as group:
            for tokens in prompts:
                group.create_task(one(tokens))
        return latencies_ms


def _direct(record: wire.WorkerRegistration) -> DirectWorker:
    return DirectWorker(record.address, record.generation)
