"""A service to look at: pools over fake engines, requests that are held where a test wants, prefixes in the index."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import unix_ms
from control_plane.fleet.vitality import VitalityTiming
from control_plane.pools.life import Pools
from control_plane.prefix_index.index import PrefixIndex
from control_plane.server.composition import RouterTiming
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key
from tests.fakes.cluster import SERVICE, Cluster
from tests.process.control_plane.pools.pool_world import FakeActors, pools_of, quiet

CHUNK_TOKENS = 32
# Between two renewals of the registrations.
RENEWED_S = 0.1
# No worker is taken for one that hangs because a test holds its engine.
_LONG_S = 3600.0
# How many requests of late begin so, and in which tiers of which workers that lies: of an agent with tools, and others.
_AGENT = "You are an agent. These are your tools: search, read, write, run. " * 3
_RAG = "Answer from these documents alone, and name the one that says so. " * 3
PREFIXES = (
    (_AGENT, 24, ("decode-0", "decode-1", "prefill-0"), ()),
    (f"{_AGENT}{'The repository has these files, among others. ' * 4}", 14, ("decode-0", "prefill-0"), ("decode-1",)),
    (f"{_AGENT}{'The ticket says that a test is red since Monday. ' * 3}", 6, ("decode-1",), ("prefill-0",)),
    (_RAG, 12, ("decode-1", "prefill-0"), ()),
    (f"{_RAG}{'Document 1: how blocks of KV are pulled over NIXL. ' * 5}", 9, ("prefill-0",), ("decode-0",)),
)


class Shown:
    """A service that runs. held: requests that wait in the engines until `release`."""

    def __init__(self, cluster: Cluster, pools: Pools, actors: FakeActors) -> None:
        self.cluster = cluster
        self.pools = pools
        self.actors = actors
        self.held: list[asyncio.Task[Any]] = []

    async def renew(self) -> None:
        """Workers tell their load, as they do with each renewal of their registrations."""
        views = (await self.cluster.admin.ListWorkers(admin.ListWorkersRequest())).workers
        load = {view.registration.worker_id: view.load for view in views if view.HasField("load")}
        for worker in self.cluster.workers:
            if worker.name in load:
                worker.record.load.CopyFrom(load[worker.name])
                # What a test holds is not one that hangs.
                worker.record.load.stalled_s = 0.0
                self.cluster.registry.write(worker.record)

    async def keep_renewing(self) -> None:
        """Until cancelled."""
        while True:
            await self.renew()
            await asyncio.sleep(RENEWED_S)

    @property
    def url(self) -> str:
        return f"http://{self.cluster.router.metrics.address}/"

    async def overview(self) -> admin.GetOverviewResponse:
        """As the admin API tells it."""
        return await self.cluster.admin.GetOverview(admin.GetOverviewRequest(workers=200))

    def hold(self, requests: int, text: str = "hello", position: int = 4) -> None:
        """So many more run, and stop at a position of their answer."""
        for worker in self.cluster.workers:
            if worker.record.pool == wire.POOL_DECODE:
                worker.engine.hold_before(position)
        for number in range(requests):
            self.held.append(asyncio.create_task(self.cluster.generate(f"{text} {number}", max_tokens=16)))

    async def release(self) -> None:
        for worker in self.cluster.workers:
            worker.engine.resume()
        await asyncio.gather(*self.held)
        self.held.clear()

    def caches(self) -> None:
        """What `PREFIXES` says, in the index of the router."""
        index = self.cluster.parts.prefixes.index
        for worker in self.cluster.workers:
            index.join(worker.name, worker.record.generation)
        for text, requests, device, host in PREFIXES:
            keys = chunk_keys(list(text.encode()), root_key(SERVICE, ""), CHUNK_TOKENS)
            for _ in range(requests):
                index.accessed(keys, unix_ms() / 1000)
            _claim(index, device, ClaimChange(device_stored=keys))
            _claim(index, host, ClaimChange(host_stored=keys))


def _claim(index: PrefixIndex, workers: tuple[str, ...], change: ClaimChange) -> None:
    for worker in workers:
        index.apply(worker, change)


@asynccontextmanager
async def shown_service(prefill: int = 1, decode: int = 2, **flags: Any) -> AsyncIterator[Shown]:
    timing = RouterTiming(vitality=VitalityTiming(silence_s=_LONG_S, doubtful_s=_LONG_S))
    settings = {"index__chunk_tokens": CHUNK_TOKENS, **flags}
    async with pools_of(prefill, decode, timing=timing, **settings) as (cluster, pools, actors):
        actors.settings = {"forms_batches": True}
        await pools.start(quiet)
        shown = Shown(cluster, pools, actors)
        renewing = asyncio.create_task(shown.keep_renewing())
        try:
            yield shown
        finally:
            renewing.cancel()
            await shown.release()
