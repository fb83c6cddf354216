"""Pools that come up with their sizes and get others from operators and their load, in a cluster of fake engines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import StartError
from control_plane.pools.timing import PoolTiming
from control_plane.server.composition import RouterTiming
from tests.fakes.answers import failure, text_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until
from tests.process.control_plane.pools.pool_world import followed, pools_of, quiet, sizes


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster() as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        yield cluster


async def test_that_ray_is_away_is_said_once_when_it_begins_and_once_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timing = RouterTiming(pools=PoolTiming(ask_ray_every_s=0.001))
    async with pools_of(timing=timing) as (_, pools, actors):
        await pools.start(quiet)
        for is_away in (True, False):
            actors.away, asked = is_away, actors.questions
            await until(lambda asked=asked: actors.questions > asked + 5)  # type: ignore[misc]
    said = [record for record in caplog.records if record.name == "control_plane.pools.life"]
    assert [record.getMessage() for record in said] == [
        "Ray does not say which workers have a process",
        "Ray says again which workers have a process",
    ]
    assert [bool(record.exc_info) for record in said] == [True, False]


# The start.


async def test_a_service_is_up_once_its_workers_are_ready() -> None:
    async with pools_of() as (cluster, pools, actors):
        heard: list[tuple[str, str]] = []
        await pools.start(lambda part, phase: heard.append((part, phase)))
        assert sorted(actors.starts) == ["decode-0", "decode-1", "prefill-0"]
        assert sizes(pools) == [(1, 1), (2, 2)]
        assert {part for part, _ in heard} == {"prefill-0", "decode-0", "decode-1"}
        assert text_of(await cluster.generate())


async def test_min_ready_workers_are_enough_and_the_others_follow() -> None:
    async with pools_of(pools__decode__min_ready=1) as (_, pools, actors):
        actors.room = 2
        await pools.start(quiet)
        assert sizes(pools) == [(1, 1), (2, 1)]
        await until(lambda: "no node has 1 GPU free" in [each.detail for each in pools.status()[1].workers])
        actors.room = 3
        await actors.admit()
        await until(lambda: sizes(pools) == [(1, 1), (2, 2)])


async def test_a_worker_that_cannot_start_ends_the_start_unless_enough_others_can() -> None:
    async with pools_of() as (_, pools, actors):
        actors.broken["decode-1"] = "worker decode-1: model.path: no such folder on h2"
        with pytest.raises(StartError, match=r"pools\.decode: .*no such folder on h2.*at least 2 have to be ready"):
            await pools.start(quiet)
    async with pools_of(pools__decode__min_ready=1) as (_, pools, actors):
        actors.broken["decode-1"] = "worker decode-1: model.path: no such folder on h2"
        await pools.start(quiet)
        assert sizes(pools)[0] == (1, 1)


async def test_a_start_whose_first_worker_is_lost_before_the_last_comes_has_an_end() -> None:
    async with pools_of(decode=1, limits__start_timeout_s=6.0) as (cluster, pools, actors):
        actors.room = 1
        starting = asyncio.create_task(pools.start(quiet))
        await until(lambda: sum(ready for _, ready in sizes(pools)) == 1)
        await asyncio.sleep(0.5)
        (first,) = cluster.workers
        cluster.workers.clear()
        await cluster.unregister(first)
        await actors.admit()
        with pytest.raises(StartError, match=f"lost before the others came: .*{first.name} is starting"):
            await starting


async def test_nothing_is_changed_while_the_service_starts() -> None:
    async with pools_of() as (cluster, pools, actors):
        actors.room = 2
        starting = asyncio.create_task(pools.start(quiet))
        await until(lambda: len(cluster.workers) == 2)
        for request in (
            admin.ScalePoolsRequest(decode_workers=1),
            admin.RemoveWorkerRequest(worker_id="decode-1"),
            admin.RestartWorkersRequest(),
        ):
            method = getattr(cluster.admin, type(request).__name__.removesuffix("Request"))
            refused = await failure(method(request))
            assert (refused.code().name, "still starting" in (refused.details() or "")) == ("FAILED_PRECONDITION", True)
        actors.room = 3
        await actors.admit()
        await starting
        assert sizes(pools) == [(1, 1), (2, 2)]


# Operators.


async def test_scaling_up_adds_and_scaling_down_drains_the_highest_numbers() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        events = await followed(cluster.admin.ScalePools(admin.ScalePoolsRequest(prefill_workers=3, decode_workers=1)))
        assert sizes(pools) == [(3, 3), (1, 1)]
        last = {event.worker.worker_id: event.worker.phase for event in events}
        assert last == {
            "prefill-1": admin.POOL_PHASE_READY,
            "prefill-2": admin.POOL_PHASE_READY,
            "decode-1": admin.POOL_PHASE_LEFT,
        }
        assert (events[-1].done, events[-1].of) == (3, 3)
        assert actors.stops == ["decode-1"]


async def test_a_worker_that_is_not_wanted_any_more_when_it_is_asked_for_does_not_come() -> None:
    async with pools_of(decode=1) as (cluster, pools, actors):
        await pools.start(quiet)
        actors.asking.clear()
        more = asyncio.create_task(followed(cluster.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=2))))
        await until(lambda: len(pools.status()[1].workers) == 2)
        less = asyncio.create_task(followed(cluster.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=1))))
        await until(lambda: pools.status()[1].desired_workers == 1)
        actors.asking.set()
        await asyncio.gather(more, less)
        assert {worker.name for worker in cluster.workers} == {"decode-0", "prefill-0"}
        assert sizes(pools) == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (admin.RemoveWorkerRequest(worker_id="decode-9"), "NOT_FOUND", "there are: prefill-0, decode-0, decode-1"),
        (admin.ScalePoolsRequest(decode_workers=0), "INVALID_ARGUMENT", "decode: must be at least 1"),
        (
            admin.ScalePoolsRequest(prefill_workers=5000),
            "INVALID_ARGUMENT",
            "prefill: must be from 0 to 1024, got 5000",
        ),
        (admin.RestartWorkersRequest(worker_ids=["x"]), "NOT_FOUND", "no worker `x`"),
    ],
)
async def test_bad_requests_change_nothing(request_: Any, code: str, says: str) -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        name = type(request_).__name__.removesuffix("Request")
        refused = await failure(getattr(cluster.admin, name)(request_))
        assert refused.code().name == code
        assert says in (refused.details() or "")
        assert (sizes(pools), actors.stops) == ([(1, 1), (2, 2)], [])


async def test_a_router_without_its_controller_says_so(cluster: Cluster) -> None:
    refused = await failure(cluster.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=2)))
    assert refused.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not (await cluster.admin.GetPools(admin.GetPoolsRequest())).pools


# The load.


async def test_a_pool_that_follows_its_load_is_not_scaled_beyond_its_bounds() -> None:
    flags: dict[str, Any] = {
        "pools__decode__autoscale__enabled": True,
        "pools__decode__autoscale__max_workers": 3,
    }
    async with pools_of(**flags) as (cluster, pools, _):
        await pools.start(quiet)
        refused = await failure(cluster.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=4)))
        assert "follows its load with 1 to 3 workers" in (refused.details() or "")


async def test_a_pool_that_follows_its_load_grows_under_it() -> None:
    flags: dict[str, Any] = {
        "pools__decode__autoscale__enabled": True,
        "pools__decode__autoscale__waiting_per_worker": 1,
        "pools__decode__autoscale__grow_after_s": 0.05,
    }
    timing = RouterTiming(pools=PoolTiming(sample_every_s=0.01))
    async with pools_of(decode=1, timing=timing, **flags) as (cluster, pools, _):
        await pools.start(quiet)
        record = wire.WorkerRegistration.FromString(named(cluster, "decode-0").record.SerializeToString())
        following = asyncio.create_task(cluster.router.follow_load())
        await asyncio.sleep(0.2)
        assert sizes(pools) == [(1, 1), (1, 1)]
        record.load.waiting_requests = 2
        await cluster.register(record)
        await until(lambda: sizes(pools) == [(1, 1), (2, 2)])
        following.cancel()
