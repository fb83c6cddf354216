"""Workers that are restarted one after the other while their pools serve, in a cluster of fake engines."""

import asyncio

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.pools.timing import PoolTiming
from control_plane.server.composition import RouterTiming
from tests.fakes.answers import failure, text_of
from tests.fakes.cluster import named, until
from tests.process.control_plane.pools.pool_world import busy_worker, followed, pools_of, quiet, removed, sizes


async def test_a_rolling_restart_starts_one_after_the_other_and_requests_go_on() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        before = {worker.name: worker.record.generation for worker in cluster.workers}
        expected = text_of(await cluster.generate())
        stopped = asyncio.Event()

        async def load() -> int:
            answers = 0
            while not stopped.is_set():
                assert text_of(await cluster.generate()) == expected
                answers += 1
            return answers

        loads = [asyncio.create_task(load()) for _ in range(4)]
        events = await followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest()))
        stopped.set()
        assert sum(await asyncio.gather(*loads)) > 0
        assert actors.stops == ["prefill-0", "decode-0", "decode-1"]
        assert {event.worker.worker_id for event in events} == set(before)
        after = {worker.name: worker.record.generation for worker in cluster.workers}
        assert after.keys() == before.keys()
        assert all(after[name] > before[name] for name in before)
        assert [status.lost_workers for status in pools.status()] == [0, 0]


async def test_pools_keep_their_sizes_while_workers_are_restarted() -> None:
    async with pools_of(decode=1) as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        restarting = asyncio.create_task(followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest())))
        await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))

        assert [status.desired_workers for status in pools.status()] == [1, 1], "a stand-in is no part of the size"
        for request in (admin.ScalePoolsRequest(decode_workers=3), admin.RestartWorkersRequest()):
            method = getattr(cluster.admin, type(request).__name__.removesuffix("Request"))
            refused = await failure(method(request))
            assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "being restarted" in (refused.details() or "")
        busy.engine.resume()
        assert text_of(await running)
        await restarting
        assert sizes(pools) == [(1, 1), (1, 1)]
        assert actors.stops == ["prefill-0", "decode-0", "decode-1"]


async def test_a_worker_that_leaves_before_its_turn_is_not_started_again() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        restarting = asyncio.create_task(followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest())))
        await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))
        request = admin.RemoveWorkerRequest(worker_id="decode-1", force=True)
        await followed(cluster.admin.RemoveWorker(request))
        busy.engine.resume()
        assert text_of(await running)
        await restarting
        assert sizes(pools) == [(1, 1), (1, 1)]
        assert actors.starts.count("decode-1") == 1


async def test_a_caller_that_leaves_ends_a_rolling_restart_after_the_worker_whose_turn_it_is() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        call = cluster.admin.RestartWorkers(admin.RestartWorkersRequest())
        await call.read()
        call.cancel()
        await until(lambda: actors.starts.count("prefill-0") == 2 and sizes(pools) == [(1, 1), (2, 2)])
        assert actors.stops == ["prefill-0"]


@pytest.mark.parametrize("phase", ["waits for its stand-in", "is drained", "comes up"])
async def test_a_restart_that_was_left_goes_on_and_keeps_others_out(phase: str) -> None:
    async with pools_of(decode=1) as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        if phase == "waits for its stand-in":
            actors.asking.clear()
        request = admin.RestartWorkersRequest(worker_ids=["decode-0"])
        call = cluster.admin.RestartWorkers(request)
        await call.read()
        if phase != "waits for its stand-in":
            await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))
        if phase == "comes up":
            actors.asking.clear()
            busy.engine.resume()
            await until(lambda: "decode-0" in actors.stops)
        call.cancel()
        await until(lambda: not pools.followed_restarts)

        refused = await failure(cluster.admin.RestartWorkers(request))
        assert "being restarted" in (refused.details() or "")
        actors.asking.set()
        busy.engine.resume()
        assert text_of(await running)
        await until(lambda: not pools.restarting() and sizes(pools) == [(1, 1), (1, 1)])
        assert (actors.starts.count("decode-0"), actors.twice) == (2, [])
        await until(lambda: "decode-1" in actors.stops)


async def test_what_has_ended_counts_for_nothing_and_does_not_register_again() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        fenced = cluster.registry.fenced
        old = wire.WorkerRegistration.FromString(named(cluster, "decode-0").record.SerializeToString())
        last = named(cluster, "decode-1").record.generation
        actors.asking.clear()
        restarting = asyncio.create_task(
            followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest(worker_ids=["decode-0"])))
        )
        await until(lambda: fenced != [])
        # The registry still has it, as after an end without a word.
        await cluster.register(old)
        await asyncio.sleep(0.5)
        assert sizes(pools)[1] == (2, 1)
        actors.asking.set()
        await restarting
        assert sizes(pools)[1] == (2, 2)

        await removed(cluster, "decode-1")
        assert fenced == [("decode-0", old.generation), ("decode-1", last)]


async def test_what_cannot_be_fenced_when_it_ends_is_fenced_once_redis_answers() -> None:
    async with pools_of(decode=3) as (cluster, pools, _):
        await pools.start(quiet)
        generations = {worker.name: worker.record.generation for worker in cluster.workers}
        cluster.registry.can_fence = False
        await removed(cluster, "decode-2")
        await followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest(worker_ids=["decode-0"])))
        assert cluster.registry.fenced == []
        cluster.registry.can_fence = True
        await until(lambda: len(cluster.registry.fenced) == 2)
        assert cluster.registry.fenced == [(name, generations[name]) for name in ("decode-2", "decode-0")]
        assert sizes(pools) == [(1, 1), (2, 2)]


# The stand-in of the only decode worker.


async def test_the_only_decode_worker_has_another_one_stand_in_while_it_restarts() -> None:
    async with pools_of(decode=1) as (cluster, pools, actors):
        await pools.start(quiet)
        await followed(cluster.admin.RestartWorkers(admin.RestartWorkersRequest(worker_ids=["decode-0"])))
        assert actors.starts[-2:] == ["decode-1", "decode-0"]
        assert actors.stops == ["decode-0", "decode-1"]
        assert sizes(pools) == [(1, 1), (1, 1)]


async def test_without_room_for_a_stand_in_the_only_decode_worker_is_left_alone() -> None:
    timing = RouterTiming(pools=PoolTiming(stand_in_room_s=0.1))
    async with pools_of(decode=1, timing=timing) as (cluster, pools, actors):
        await pools.start(quiet)
        actors.room = 2
        refused = await failure(cluster.admin.RestartWorkers(admin.RestartWorkersRequest(worker_ids=["decode-0"])))
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "no node has 1 GPU free" in (refused.details() or "")
        assert sizes(pools) == [(1, 1), (1, 1)]
        assert text_of(await cluster.generate())


async def test_a_stand_in_that_does_not_come_leaves_nothing_behind() -> None:
    async with pools_of(decode=1) as (cluster, pools, actors):
        await pools.start(quiet)
        actors.broken["decode-1"] = "worker decode-1: no memory"
        request = admin.RestartWorkersRequest(worker_ids=["decode-0"])
        refused = await failure(cluster.admin.RestartWorkers(request))
        assert "no memory" in (refused.details() or "")
        assert [worker.worker_id for worker in pools.status()[1].workers] == ["decode-0"]
        assert (sizes(pools), actors.stops) == ([(1, 1), (1, 1)], ["decode-1"])
        assert text_of(await cluster.generate())
