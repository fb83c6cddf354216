"""A pool of workers that do both: started, scaled, drained and restarted as the others are, without any others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.pools.life import Pools
from control_plane.pools.timing import PoolTiming
from control_plane.server.composition import RouterTiming
from tests.fakes.answers import failure, text_of, whole_text
from tests.fakes.cluster import SHARED, Cluster, named, until
from tests.process.control_plane.pools.pool_world import FakeActors, followed, pools_of, quiet, removed, sizes


@asynccontextmanager
async def shared(workers: int = 2, **flags: Any) -> AsyncIterator[tuple[Cluster, Pools, FakeActors]]:
    flags = {"pools__shared__workers": workers, "placement__disaggregation": "conditional", **flags}
    async with pools_of(0, 0, **flags) as (cluster, pools, actors):
        await pools.start(quiet)
        yield cluster, pools, actors


async def test_the_service_is_up_with_its_one_pool_and_tells_of_no_other() -> None:
    async with shared() as (cluster, pools, actors):
        assert sorted(actors.starts) == ["shared-0", "shared-1"]
        assert sizes(pools) == [(2, 2)]
        overview = await cluster.admin.GetOverview(admin.GetOverviewRequest(workers=5))
        assert [(pool.pool, dict(pool.workers)) for pool in overview.pools] == [(SHARED, {"ready": 2})]
        assert text_of(await cluster.generate()) == whole_text()


async def test_it_is_scaled_by_its_own_name() -> None:
    async with shared() as (cluster, pools, actors):
        await followed(cluster.admin.ScalePools(admin.ScalePoolsRequest(shared_workers=3)))
        assert sizes(pools) == [(3, 3)]
        await followed(cluster.admin.ScalePools(admin.ScalePoolsRequest(shared_workers=1)))
        assert (sizes(pools), sorted(actors.stops)) == ([(1, 1)], ["shared-1", "shared-2"])


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (admin.ScalePoolsRequest(decode_workers=2), "decode: this service has no such pool, it has shared"),
        (admin.ScalePoolsRequest(shared_workers=0), "shared: must be at least 1: without a shared worker nothing is"),
    ],
)
async def test_sizes_that_it_cannot_have_are_refused(request_: admin.ScalePoolsRequest, says: str) -> None:
    async with shared() as (cluster, pools, _):
        assert says in ((await failure(cluster.admin.ScalePools(request_))).details() or "")
        assert sizes(pools) == [(2, 2)]


async def test_separate_pools_have_no_shared_worker() -> None:
    async with pools_of() as (cluster, pools, _):
        await pools.start(quiet)
        refused = await failure(cluster.admin.ScalePools(admin.ScalePoolsRequest(shared_workers=2)))
        assert "shared: this service has no such pool, it has prefill and decode" in (refused.details() or "")


async def test_an_answer_leaves_a_worker_that_is_drained_for_the_other_one() -> None:
    async with shared() as (cluster, _, actors):
        busy = named(cluster, "shared-0")
        busy.engine.hold_before(4)
        running = asyncio.create_task(cluster.generate(max_tokens=8))
        await busy.engine.held.wait()

        await removed(cluster, "shared-0")

        assert actors.stops == ["shared-0"]
        responses = await running
        assert text_of(responses) == whole_text()
        assert responses[-1].completion.route.decode_worker_id == "shared-1"


async def test_the_last_one_leaves_by_force_alone_and_has_a_stand_in_while_it_restarts() -> None:
    async with shared(1) as (cluster, pools, actors):
        refused = await failure(cluster.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id="shared-0")))
        assert "no shared worker is ready" in (refused.details() or "") and "scale shared=2" in (
            refused.details() or ""
        )
        await followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest()))
        assert actors.starts == ["shared-0", "shared-1", "shared-0"]
        await until(lambda: sizes(pools) == [(1, 1)])
        assert actors.stops == ["shared-0", "shared-1"]


async def test_it_follows_its_load() -> None:
    """By what waits there, as decode workers do."""
    flags: dict[str, Any] = {
        "pools__shared__autoscale__enabled": True,
        "pools__shared__autoscale__waiting_per_worker": 1,
        "pools__shared__autoscale__grow_after_s": 0.05,
        "timing": RouterTiming(pools=PoolTiming(sample_every_s=0.01)),
    }
    async with shared(1, **flags) as (cluster, pools, _):
        record = wire.WorkerRegistration.FromString(named(cluster, "shared-0").record.SerializeToString())
        following = asyncio.create_task(cluster.router.follow_load())
        record.load.waiting_requests = 2
        await cluster.register(record)
        await until(lambda: sizes(pools) == [(2, 2)])
        following.cancel()
