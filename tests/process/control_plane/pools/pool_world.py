"""A cluster with pools over real routers and services and fake engines: `FakeActors` stands in for Ray.

It starts and ends workers of the cluster in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from control_plane.model.worker_snapshot import Pool
from control_plane.pools.life import Pools
from control_plane.server.composition import ROUTER_TIMING, RouterTiming
from tests.fakes.answers import HELLO
from tests.fakes.cluster import Cluster, Worker, named, running_cluster


class FakeActors:
    """broken: workers that do not come up, and why. room: how many processes there may be.

    asking: cleared, a start does not get to ask for a process. twice: processes of one name that were alive together.
    cluster: once there is one; its router is made with these actors. settings: of the engines, as of `FakeEngine`.
    left: the pools have stopped already, and their workers go on. away: Ray is; questions: that it was asked.
    """

    cluster: Cluster

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}
        self.room = 100
        self.asking = asyncio.Event()
        self.asking.set()
        self.twice: list[str] = []
        self.starts: list[str] = []
        self.stops: list[str] = []
        self.settings: Mapping[str, Any] = {}
        self.left = self.away = False
        self.questions = 0
        self._waiting: dict[str, Pool] = {}
        self._admitting = asyncio.Lock()

    async def start(self, pool: Pool, worker_id: str) -> None:
        await self.asking.wait()
        self.starts.append(worker_id)
        if worker_id in self._waiting or any(worker.name == worker_id for worker in self.cluster.workers):
            self.twice.append(worker_id)
        self._waiting[worker_id] = pool
        if worker_id not in self.broken:
            await self.admit()

    async def admit(self) -> None:
        """Whoever waits and has room comes up."""
        async with self._admitting:
            for worker_id, pool in list(self._waiting.items()):
                if len(self.cluster.workers) < self.room:
                    del self._waiting[worker_id]
                    await self.cluster.add(pool, worker_id, number=len(self.starts), **self.settings)

    async def failure(self, worker_id: str) -> str:
        if worker_id not in self.broken:
            await asyncio.Event().wait()
        return self.broken[worker_id]

    async def stop(self, worker_id: str) -> None:
        self.stops.append(worker_id)
        if self._waiting.pop(worker_id, None) is None:
            if worker_id not in [worker.name for worker in self.cluster.workers]:
                return
            worker = named(self.cluster, worker_id)
            self.cluster.workers.remove(worker)
            await self.cluster.unregister(worker)
            await worker.server.stop(None)

    async def without_node(self) -> Mapping[str, str]:
        self.questions += 1
        if self.away:
            # Its errors differ from one to the next.
            raise RuntimeError(f"the GCS does not answer, {self.questions}")
        return dict.fromkeys(self._waiting, "no node has 1 GPU free")


@asynccontextmanager
async def pools_of(
    prefill: int = 1, decode: int = 2, *, timing: RouterTiming = ROUTER_TIMING, **flags: Any
) -> AsyncIterator[tuple[Cluster, Pools, FakeActors]]:
    sizes = {"pools__prefill__workers": prefill, "pools__decode__workers": decode}
    limits = {"limits__session_grace_s": 0.01, "limits__start_timeout_s": 20.0}
    actors = FakeActors()
    async with running_cluster(actors, timing, **{**limits, **sizes, **flags}) as cluster:
        actors.cluster, pools = cluster, cluster.parts.pools
        assert pools is not None
        try:
            yield cluster, pools, actors
        finally:
            if not actors.left:
                await pools.stop()


def quiet(_part: str, _phase: str) -> None:
    pass


async def followed(call: Any) -> list[admin.PoolEvent]:
    return [response.event async for response in call]


async def removed(cluster: Cluster, worker_id: str) -> list[admin.PoolEvent]:
    return await followed(cluster.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id=worker_id)))


async def busy_worker(cluster: Cluster) -> tuple[Worker, "asyncio.Task[list[api.GenerateResponse]]"]:
    """decode-0 with a request that waits there for `engine.resume`: of somebody who does not take it away."""
    busy = named(cluster, "decode-0")
    busy.engine.hold_before(4)
    running = asyncio.create_task(_generate_at(busy))
    await busy.engine.held.wait()
    return busy, running


async def _generate_at(worker: Worker) -> list[api.GenerateResponse]:
    request = wire.DecodeRequest(
        request_id="of-another-router",
        generation=worker.record.generation,
        token_ids=HELLO,
        sampling=generation.SamplingParams(max_tokens=8, temperature=0.0),
    )
    async with grpc.aio.insecure_channel(worker.record.address) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        messages = [message async for message in stub.Decode(request)]
    return [api.GenerateResponse(delta=message.delta) for message in messages if message.HasField("delta")] + [
        api.GenerateResponse(delta=messages[-1].end.delta)
    ]


def sizes(pools: Pools) -> list[tuple[int, int]]:
    return [(status.desired_workers, status.ready_workers) for status in pools.status()]
