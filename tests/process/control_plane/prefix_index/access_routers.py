"""Routers that tell each other their requests through a real Redis, which may answer too late or not at all."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
import redis

from cluster_configs.schema import IndexSection
from cluster_core.clock import ClusterClock, UnixMs, unix_ms
from cluster_wire.redis_client import RedisClient, connect
from control_plane.prefix_index.access_log import SNAPSHOTS, AccessLog, SnapshotTiming
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.prefix_chunks import Keys, chunk_keys, root_key
from tests.process.control_plane.prefix_index.followed_index import CountedPause

SERVICE = "svc-test"
HALF_LIFE_S = 600.0
# The index counts what it has just got to know as a little more than nothing.
NEARLY = 0.05


def prompt(seed: int, chunks: int = 4) -> Keys:
    tokens = np.random.default_rng(seed).integers(0, 50_000, 128 * chunks).astype(np.uint32)
    return chunk_keys(tokens, root_key(SERVICE, f"tenant-{seed}"), 128)


class Weak:
    """A client whose server does not answer, before or after it did what it was asked to."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.fails_before = self.fails_after = False
        # What somebody else does once, just before a script runs.
        self.first: list[Callable[[], Awaitable[None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def eval(self, *arguments: Any) -> Any:
        while self.first:
            await self.first.pop()()
        return await self._client.eval(*arguments)

    def pipeline(self, *, transaction: bool) -> Any:
        pipeline = self._client.pipeline(transaction=transaction)
        execute, xadd = pipeline.execute, pipeline.xadd
        writes = []

        def noted_xadd(*arguments: Any, **options: Any) -> Any:
            writes.append(arguments)
            return xadd(*arguments, **options)

        async def weak_execute(**options: Any) -> Any:
            if self.fails_before:
                raise redis.ConnectionError("down")
            answers = await execute(**options)
            if self.fails_after and writes:
                raise redis.TimeoutError("no answer")
            return answers

        pipeline.execute, pipeline.xadd = weak_execute, noted_xadd
        return pipeline


class Router:
    """The access log of one router, and the index that it counts in."""

    def __init__(
        self,
        url: str,
        router_id: str,
        *,
        entries: int = 1 << 14,
        snapshots: SnapshotTiming = SNAPSHOTS,
        ahead_ms: int = 0,
    ) -> None:
        clock = ClusterClock(lambda: UnixMs(unix_ms() + ahead_ms))
        self.index = PrefixIndex(entries, HALF_LIFE_S, clock.unix_s())
        self.client = Weak(connect(url, 2.0))
        self.pause = CountedPause(0.001, 0.001)
        self.log = AccessLog(
            cast(RedisClient, self.client),
            SERVICE,
            self.index,
            IndexSection(refresh_s=0.001, half_life_s=HALF_LIFE_S),
            router_id=router_id,
            snapshots=snapshots,
            clock=clock,
            pause=self.pause,
        )

    def requests(self, keys: Keys) -> float:
        """How many requests have asked for this prompt, of late."""
        rates = self.index.hotness(keys, self.log.now_s())
        assert np.allclose(rates, rates[0])
        return float(rates[0] * HALF_LIFE_S / np.log(2))

    async def polls(self, times: int = 2) -> None:
        for _ in range(times):
            await self.log.poll()
