"""Health, what operators ask and do, and how the router stops.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from tests.fakes.answers import collected, completion_of, failure, field_of, text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until


async def health_of(cluster: Cluster, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def until_health(cluster: Cluster, status: int) -> None:
    async with asyncio.timeout(60):
        while await health_of(cluster) != status:
            pass


async def test_health_follows_whether_a_decode_worker_is_ready(empty: Cluster) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    await empty.add(PREFILL)
    assert await health_of(empty) == not_serving

    worker = await empty.add(DECODE)
    await until_health(empty, serving)
    assert await health_of(empty, "rachis.v1.RouterService") == serving

    await empty.unregister(worker)
    await until_health(empty, not_serving)


async def test_health_can_be_watched(empty: Cluster) -> None:
    watch = health_pb2_grpc.HealthStub(empty.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)

    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await empty.add(DECODE)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_workers_are_listed_with_load_and_what_the_router_has_on_them(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    call = cluster.call()
    await decoder.held.wait()

    views = {
        view.registration.worker_id: view
        for view in (await cluster.admin.ListWorkers(admin.ListWorkersRequest())).workers
    }

    assert sorted(views) == ["decode-0", "prefill-0"]
    assert (views["decode-0"].in_flight_requests, views["decode-0"].load.running_requests) == (1, 1)
    assert (views["prefill-0"].in_flight_requests, views["prefill-0"].counters.handoffs_leased) == (0, 1)
    decoder.resume()
    await collected(call)


async def test_a_worker_that_does_not_answer_is_listed_without_load(cluster: Cluster) -> None:
    await named(cluster, "decode-0").crash()

    views = (await cluster.admin.ListWorkers(admin.ListWorkersRequest())).workers

    assert [(view.registration.worker_id, view.HasField("load")) for view in views] == [
        ("decode-0", False),
        ("prefill-0", True),
    ]


async def test_workers_are_listed_with_their_tiers_and_with_so_many_of_their_hottest_prefixes(empty: Cluster) -> None:
    await empty.add(PREFILL)
    await empty.add(DECODE, has_tiers=False)
    for text in ("hello", "hello", "other"):
        await empty.generate(text)

    views = (await empty.admin.ListWorkers(admin.ListWorkersRequest())).workers
    asked = (await empty.admin.ListWorkers(admin.ListWorkersRequest(hottest_prefixes=1))).workers

    assert [(view.HasField("tiers"), view.HasField("hottest")) for view in views] == [(False, False), (True, False)]
    assert [(view.HasField("tiers"), view.HasField("hottest")) for view in asked] == [(False, False), (True, True)]
    assert (asked[1].tiers.prompt_tokens, asked[1].tiers.device_hit_tokens) == (15, 4)
    assert [(each.tokens, each.frequency) for each in asked[1].hottest.prefixes] == [(4, 2)]


async def test_a_drained_worker_gives_up_what_it_runs_and_gets_nothing_new_until_resumed(cluster_2x2: Cluster) -> None:
    drained = named(cluster_2x2, "decode-0")
    drained.engine.hold_before(4)
    running = cluster_2x2.call()
    await drained.engine.held.wait()

    response = await cluster_2x2.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))

    assert response.state == wire.WORKER_STATE_DRAINING
    await until(lambda: [worker.worker_id for worker in cluster_2x2.router.membership.usable(DECODE)] == ["decode-1"])
    routes = [completion_of(await cluster_2x2.generate()).route for _ in range(3)]
    assert {route.decode_worker_id for route in routes} == {"decode-1"}
    assert completion_of(await collected(running)).route.decode_worker_id == "decode-1"
    drained.engine.resume()

    await cluster_2x2.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id="decode-0"))
    await until(lambda: len(cluster_2x2.router.membership.usable(DECODE)) == 2)
    assert completion_of(await cluster_2x2.generate()).route.decode_worker_id == "decode-0"


async def test_draining_an_unknown_worker_names_the_known_ones(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="decode-0, prefill-0") as caught:
        await cluster.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-7"))

    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "worker_id")


async def test_the_routers_status_counts_outcomes_and_times_itself(cluster: Cluster) -> None:
    await cluster.generate()
    await failure(cluster.call(""))

    status = await cluster.admin.GetRouterStatus(admin.GetRouterStatusRequest())

    assert dict(status.outcomes) == {"finished": 1, "refused": 1}
    assert (status.in_flight_requests, status.queued_requests, status.service_id) == (0, 0, "svc-test")
    assert 0 < status.overhead_p50_ms <= status.overhead_p99_ms
    assert status.registry_connected


async def test_the_routers_status_says_how_full_redis_is_where_it_does(cluster: Cluster) -> None:
    assert not (await cluster.admin.GetRouterStatus(admin.GetRouterStatusRequest())).HasField("redis_memory")

    async def eval(script: str, keys: int, *args: Any) -> bytes:
        return b"# Memory\r\nused_memory:7\r\nmaxmemory:9\r\nmaxmemory_policy:noeviction\r\n"

    # What stands for Redis here takes no memory.
    cluster.registry.eval = eval  # type: ignore[method-assign]
    told = (await cluster.admin.GetRouterStatus(admin.GetRouterStatusRequest())).redis_memory
    assert (told.what, told.used_bytes, told.limit_bytes, told.limit) == ("redis", 7, 9, "maxmemory")


async def test_the_configuration_in_force_is_shown_with_sources_and_masked() -> None:
    async with running_cluster(redis__url="redis://:hush@host/0") as cluster:
        response = await cluster.admin.GetEffectiveConfig(admin.GetEffectiveConfigRequest())

    entries = {entry.key: (entry.value, entry.source) for entry in response.entries}
    assert entries["redis.url"] == ('"redis://:***@host/0"', "flag")
    assert entries["router.max_queued_requests"] == ("256", "default")


async def test_stopping_lets_what_runs_finish_and_takes_nothing_new(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    call = cluster.call()
    await decoder.held.wait()

    stopping = asyncio.create_task(cluster.router.stop())
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await until_health(cluster, health_pb2.HealthCheckResponse.UNKNOWN)
    # gRPC answers calls that meet the stopping server in one way or the other.
    assert late.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    decoder.resume()

    assert text_of(await collected(call)) == whole_text()
    await stopping
