"""Requests to two sides in the same run, in short rounds that alternate which side goes first, never both at once."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from cluster_core.clock import monotonic_s

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


async def compare(
    requests: int,
    concurrency: int,
    draw: Callable[[], list[int]],
    cluster: Send,
    direct: Send,
    on_done: Callable[[], None],
) -> Sides:
    """draw: a prompt; none is sent twice."""
    sides = Sides()
    rounds = max(1, requests // (ROUND_FACTOR * concurrency))
    for turn in range(rounds):
        first = turn * requests // rounds
        size = (turn + 1) * requests // rounds - first
        order = ((cluster, sides.cluster_ms), (direct, sides.direct_ms))
        for send, latencies_ms in order if turn % 2 else reversed(order):
            latencies_ms += await _round([draw() for _ in range(size)], concurrency, send, on_done)
    return sides


def random_prompts(rng: random.Random, length: int, vocabulary: int) -> Callable[[], list[int]]:
    return lambda: [rng.randrange(vocabulary) for _ in range(length)]


async def _round(prompts: list[list[int]], concurrency: int, send: Send, on_done: Callable[[], None]) -> list[float]:
    slots = asyncio.Semaphore(concurrency)
    latencies_ms: list[float] = []

    async def one(tokens: list[int]) -> None:
        async with slots:
            began_s = monotonic_s()
            await send(tokens)
            latencies_ms.append((monotonic_s() - began_s) * 1000)
        on_done()

    async with asyncio.TaskGroup() as group:
        for tokens in prompts:
            group.create_task(one(tokens))
    return latencies_ms
