"""What router and hand-off add to a request, over the same engines called directly.

Two comparisons, both sides in the same run, in short rounds that alternate which side goes first:

    router     one token:    client -> router -> prefill worker    against   client -> prefill worker
    hand-off   many tokens:  client -> router -> prefill -> NIXL -> decode worker
                                                                   against   client -> decode worker, which prefills too

A figure is the difference between the two sides at the same quantile of whole-request latency, in milliseconds. The
router's own clock (`router_own_*`) says how much of it was spent inside the router process.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rachis import AsyncClient, token_prompt
from rachis.v1 import worker_pb2 as wire

from benchmarks.direct_call import DirectWorker
from benchmarks.two_sides import Sides, compare, random_prompts
from cluster_core.clock import monotonic_s
from cluster_wire.secret import Secret

PROMPT_TOKENS = 64
HANDOFF_PROMPT_TOKENS = 512
HANDOFF_NEW_TOKENS = 8
# Requests of each kind before anything counts: Ray is still busy with itself when the service is up.
WARM_UP = 60
CONCURRENCIES = (1, 8)
# One-token requests are short and their difference small: more of them for the same time.
ROUTER_FACTOR = 4


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
    """Runs against one service. `on_done` is called after every request. secret: of the service, whose workers answer
    nobody without it."""

    def __init__(
        self, cluster: AsyncClient, on_done: Callable[[], None], secret: Secret | None = None, seed: int = 0
    ) -> None:
        self._cluster = cluster
        self._secret = secret
        self._on_done = on_done
        self._rng = random.Random(seed)

    async def run(self, requests: int) -> dict[int, Measured]:
        views = {view.registration.pool: view.registration for view in await self._cluster.workers()}
        prefill, decode = (self._direct(views[pool]) for pool in (wire.POOL_PREFILL, wire.POOL_DECODE))
        vocabulary = views[wire.POOL_DECODE].model.vocabulary_size
        try:
            await self._measure(WARM_UP, 1, prefill, decode, vocabulary)
            return {each: await self._measure(requests, each, prefill, decode, vocabulary) for each in CONCURRENCIES}
        finally:
            await prefill.close()
            await decode.close()

    def _direct(self, record: wire.WorkerRegistration) -> DirectWorker:
        return DirectWorker(record.address, record.generation, self._secret)

    async def _measure(
        self, requests: int, concurrency: int, prefill: DirectWorker, decode: DirectWorker, vocabulary: int
    ) -> Measured:
        whole: dict[str, Any] = {"max_tokens": HANDOFF_NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        before, started_s = await self._cluster.router_status(), monotonic_s()
        router = await compare(
            ROUTER_FACTOR * requests,
            concurrency,
            random_prompts(self._rng, PROMPT_TOKENS, vocabulary),
            lambda tokens: self._cluster.generate(token_prompt(tokens), max_tokens=1, temperature=0.0),
            prefill.first_token,
            self._on_done,
        )
        handoff = await compare(
            requests,
            concurrency,
            random_prompts(self._rng, HANDOFF_PROMPT_TOKENS, vocabulary),
            lambda tokens: self._cluster.generate(token_prompt(tokens), **whole),
            lambda tokens: decode.decode(tokens, whole),
            self._on_done,
        )
        wall_s, after = monotonic_s() - started_s, await self._cluster.router_status()
        sent = len(router.cluster_ms) + len(handoff.cluster_ms)
        return Measured(router, handoff, after.cpu_s - before.cpu_s, sent, wall_s)
