"""A follower of workers in memory, on a clock of its own, and how a task of a test is ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_wire.easing_pause import EasingPause
from cluster_wire.redis_client import RedisClient
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from tests.fakes.claim_streams import SERVICE, MemoryStreams, Unreliable, WritingWorker


class CountedPause(EasingPause):
    """A pause that counts what it is told of."""

    times = 0

    def came(self) -> None:
        self.times += 1


class Followed:
    """A follower of workers in memory, on a clock of its own."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.now_s = 100.0
        self.store = MemoryStreams()
        self.client = Unreliable(self.store.client())
        self.membership = Membership()
        self.index = index or PrefixIndex(1 << 20, half_life_s=600.0)
        self.follower = IndexFollower(
            cast(RedisClient, self.client),
            SERVICE,
            self.membership,
            self.index,
            IndexSection(refresh_s=0.001),
            is_fit=lambda block_tokens: block_tokens == 16,
            now_s=lambda: self.now_s,
        )
        self.records: dict[str, wire.WorkerRegistration] = {}

    def worker(self, worker_id: str, generation: int = 7) -> WritingWorker:
        self.register(worker_id, generation)
        return WritingWorker(self.store, worker_id, generation)

    def register(self, worker_id: str, generation: int = 7, **counts: int) -> None:
        record = wire.WorkerRegistration(worker_id=worker_id, generation=generation, **counts)  # type: ignore[arg-type]
        self.records[worker_id] = record
        self.membership.replace(self.records.values())

    def leave(self, worker_id: str) -> None:
        del self.records[worker_id]
        self.membership.replace(self.records.values())

    def device(self, worker_id: str) -> set[int]:
        return set(self.index.claims(worker_id)[0].tolist())

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower.follow())
        try:
            yield
        finally:
            await cancelled(task)


async def cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
