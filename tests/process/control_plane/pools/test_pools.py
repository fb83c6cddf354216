"""Pools that are brought up, scaled, drained and restarted, over real routers and services and fake engines.

`FakeActors` stands in for Ray: it starts and ends workers of the cluster in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import DeadlineError, StartError
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.life import Pools
from control_plane.pools.timing import PoolTiming
from control_plane.server.composition import ROUTER_TIMING, RouterTiming
from tests.fakes.cluster import DECODE, PREFILL, Cluster, Worker, failure, named, running_cluster, text_of, until

HELLO = {"max_tokens": 8}


class FakeActors:
    """broken: workers that do not come up, and why. room: how many processes there may be.

    asking: cleared, a start does not get to ask for a process. twice: processes of one name that were alive together.
    cluster: once there is one; its router is made with these actors.
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
                    await self.cluster.add(pool, worker_id, number=len(self.starts))

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
            await pools.stop()


def quiet(_part: str, _phase: str) -> None:
    pass


async def followed(call: Any) -> list[admin.PoolEvent]:
    return [response.event async for response in call]


async def removed(cluster: Cluster, worker_id: str) -> list[admin.PoolEvent]:
    return await followed(cluster.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id=worker_id)))


async def busy_worker(cluster: Cluster) -> tuple[Worker, "asyncio.Task[list[api.GenerateResponse]]"]:
    """decode-0 with a request that waits there for `engine.resume`."""
    busy = named(cluster, "decode-0")
    busy.engine.hold_before(4)
    running = asyncio.create_task(cluster.generate(max_tokens=8))
    await busy.engine.held.wait()
    return busy, running


def sizes(pools: Pools) -> list[tuple[int, int]]:
    return [(status.desired_workers, status.ready_workers) for status in pools.status()]


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
    async with pools_of(decode=1, limits__start_timeout_s=2.0) as (cluster, pools, actors):
        actors.room = 1
        starting = asyncio.create_task(pools.start(quiet))
        await until(lambda: sum(ready for _, ready in sizes(pools)) == 1)
        await asyncio.sleep(0.5)
        (first,) = cluster.workers
        cluster.workers.clear()
        await cluster.unregister(first)
        await actors.admit()
        with pytest.raises(StartError, match=f"lost before the others came: {first.name} is starting"):
            await starting


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


async def test_a_drained_worker_leaves_only_after_what_it_runs_has_ended() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        leaving = asyncio.create_task(removed(cluster, "decode-0"))
        await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))
        assert actors.stops == []
        assert text_of(await cluster.generate()), "the other one serves"

        busy.engine.resume()
        assert text_of(await running) == text_of(await cluster.generate(max_tokens=8))
        await leaving
        assert actors.stops == ["decode-0"]
        assert sizes(pools) == [(1, 1), (1, 1)]
        assert [status.lost_workers for status in pools.status()] == [0, 0]


async def test_a_worker_that_is_too_busy_to_answer_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        asked, ask = 0, cluster.parts.client.status

        async def late(*args: Any) -> wire.GetWorkerStatusResponse:
            nonlocal asked
            asked += 1
            if asked < 4:
                raise DeadlineError("worker decode-0: Deadline Exceeded")
            return await ask(*args)

        # A worker that is really late takes two seconds each time.
        monkeypatch.setattr(cluster.parts.client, "status", late)
        leaving = asyncio.create_task(removed(cluster, "decode-0"))
        await until(lambda: asked > 5)
        assert actors.stops == []
        busy.engine.resume()
        assert text_of(await running)
        await leaving
        assert actors.stops == ["decode-0"]


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


async def test_a_worker_that_does_not_become_idle_leaves_when_its_time_is_over() -> None:
    async with pools_of(limits__drain_timeout_s=0.1) as (cluster, pools, actors):
        await pools.start(quiet)
        busy = named(cluster, "decode-0")
        busy.engine.hold_before(4)
        running = asyncio.create_task(failure(cluster.call(max_tokens=8)))
        await busy.engine.held.wait()
        await followed(cluster.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id="decode-0")))
        assert actors.stops == ["decode-0"]
        assert (await running).code() is grpc.StatusCode.UNAVAILABLE


async def test_the_last_decode_worker_leaves_by_force_alone() -> None:
    async with pools_of(decode=1) as (cluster, pools, _):
        await pools.start(quiet)
        request = admin.RemoveWorkerRequest(worker_id="decode-0")
        refused = await failure(cluster.admin.RemoveWorker(request))
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "no decode worker is ready" in (refused.details() or "")
        request.force = True
        await followed(cluster.admin.RemoveWorker(request))
        assert sizes(pools) == [(1, 1), (0, 0)]


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


async def test_a_worker_that_is_taken_back_while_it_leaves_is_told_again() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        leaving = asyncio.create_task(removed(cluster, "decode-0"))
        await until(lambda: busy.record.state == wire.WORKER_STATE_DRAINING)
        await cluster.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id="decode-0"))
        await until(lambda: busy.record.state == wire.WORKER_STATE_DRAINING)
        busy.engine.resume()
        assert text_of(await running)
        await leaving
        assert actors.stops == ["decode-0"]


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


async def test_a_pool_that_follows_its_load_is_not_scaled_beyond_its_bounds() -> None:
    flags: dict[str, Any] = {
        "pools__decode__autoscale__enabled": True,
        "pools__decode__autoscale__max_workers": 3,
    }
    async with pools_of(**flags) as (cluster, pools, _):
        await pools.start(quiet)
        refused = await failure(cluster.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=4)))
        assert "follows its load with 1 to 3 workers" in (refused.details() or "")


async def test_a_router_without_its_controller_says_so(cluster: Cluster) -> None:
    refused = await failure(cluster.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=2)))
    assert refused.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not (await cluster.admin.GetPools(admin.GetPoolsRequest())).pools


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


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster() as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        yield cluster


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
