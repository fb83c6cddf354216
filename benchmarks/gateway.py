"""What HTTP adds to gRPC: streamed completions through a gateway, and through the router's own service, by turns.

added     quantiles of whole-request latency over HTTP less those over gRPC, in milliseconds
CPU       of the gateways' processes while they streamed, a token, in microseconds
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from rachis import AsyncClient, token_prompt

from benchmarks.two_sides import Sides, compare, random_prompts

PROMPT_TOKENS = 64
NEW_TOKENS = 32
WARM_UP = 20
CONCURRENCIES = (1, 16)
_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Measured:
    """Of one concurrency."""

    sides: Sides
    cpu_s: float
    tokens: int

    def table(self) -> dict[str, float]:
        return {
            "added_p50_ms": round(self.sides.added_ms(0.5), 3),
            "added_p99_ms": round(self.sides.added_ms(0.99), 3),
            "cpu_us_per_token": round(1e6 * self.cpu_s / self.tokens, 1),
        }


class GatewayBenchmark:
    """Against the gateways at `url`, whose processes are `pids`. `on_done` is called after every request."""

    def __init__(
        self, cluster: AsyncClient, url: str, pids: Sequence[int], on_done: Callable[[], None], seed: int = 0
    ) -> None:
        self._cluster = cluster
        self._url = url
        self._processes = [psutil.Process(pid) for pid in pids]
        self._on_done = on_done
        self._rng = random.Random(seed)
        self._tokens = 0

    async def run(self, requests: int) -> dict[int, Measured]:
        model = (await self._cluster.workers())[0].registration.model
        # As many connections as requests at once: a kept one stays with its process, of several.
        limits = httpx.Limits(max_connections=max(CONCURRENCIES), max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, limits=limits) as client:
            await self._measure(WARM_UP, 1, client, model.name, model.vocabulary_size)
            return {
                each: await self._measure(requests, each, client, model.name, model.vocabulary_size)
                for each in CONCURRENCIES
            }

    async def _measure(
        self, requests: int, concurrency: int, client: httpx.AsyncClient, model: str, vocabulary: int
    ) -> Measured:
        wishes: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}

        async def over_http(tokens: list[int]) -> None:
            body = {"model": model, "prompt": tokens, "stream": True, **wishes}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    assert not line.startswith('data: {"error"'), line

        async def over_grpc(tokens: list[int]) -> None:
            async for _ in self._cluster.stream(token_prompt(tokens), **wishes):
                pass

        before_s = self._cpu_s()
        prompts = random_prompts(self._rng, PROMPT_TOKENS, vocabulary)
        sides = await compare(requests, concurrency, prompts, over_http, over_grpc, self._on_done)
        return Measured(sides, self._cpu_s() - before_s, len(sides.cluster_ms) * NEW_TOKENS)

    def _cpu_s(self) -> float:
        """What they take while gRPC is asked, which is next to nothing, counts as well."""
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)
