"""What a router tells over HTTP: figures for Prometheus, and whether it is live and ready."""

import asyncio
import importlib.metadata
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client.core import Metric
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.objectives import ClassObjectives, RequestClass
from control_plane.metrics.probe_server import Probes
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.metrics.service_metrics import pool_metrics
from control_plane.metrics.worker_metrics import node_metrics, registration_metrics, worker_metrics
from control_plane.model.lifecycle import OUTCOMES
from control_plane.model.request_trace import RequestTrace
from tests.fakes.answers import collected, failure
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster, until

INTERACTIVE = {"class": "interactive"}
RECORD = generation.SessionRecord(
    tokens=generation.SessionProgress(
        received_tokens=300, computed_tokens=250, reused_tokens=50, invalidated_tokens=20
    ),
    preemptions_swap=2,
    preemptions_recompute=1,
    events=[generation.SessionEvent(kind=generation.SESSION_EVENT_KIND_PREEMPTED_SWAP, at_ms=40.0, tokens=96)],
    ttft_from_open_ms=1200.0,
    ttft_from_finish_ms=30.0,
)


def test_a_session_is_observed_from_its_opening_and_from_its_finish() -> None:
    metrics = RouterMetrics()
    metrics.session_ended(RECORD, RequestTrace())
    sample = metrics.registry.get_sample_value
    assert sample("rachis_session_ttft_seconds_sum", {"since": "open"}) == 1.2
    assert sample("rachis_session_ttft_seconds_sum", {"since": "finish"}) == 0.03
    assert sample("rachis_session_event_seconds_sum", {"event": "preempted_swap"}) == 0.04
    assert sample("rachis_session_tokens_sum", {"outcome": "invalidated"}) == 20
    assert sample("rachis_session_preemptions_total", {"strategy": "swap"}) == 2
    assert sample("rachis_session_preemptions_total", {"strategy": "recompute"}) == 1


async def fetched(metrics: RouterMetrics, path: str) -> tuple[int, str]:
    """Status and body, without keeping the loop busy."""

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{metrics.address}{path}", timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


def value(cluster: Cluster, name: str, **labels: str) -> float | None:
    return cluster.router.metrics.registry.get_sample_value(f"rachis_{name}", labels)


async def read(cluster: Cluster, name: str, **labels: str) -> float | None:
    """Of a figure that is read on the loop, as a scrape reads it."""
    return await asyncio.to_thread(value, cluster, name, **labels)


@pytest.fixture
async def served() -> AsyncIterator[Callable[[str], RouterMetrics]]:
    """Makes endpoints of routers that are ready unless a reason is given."""
    made: list[RouterMetrics] = []

    def serve(reason: str = "") -> RouterMetrics:
        metrics = RouterMetrics()
        metrics.serve("127.0.0.1", 0, Probes(asyncio.get_running_loop(), lambda: reason))
        made.append(metrics)
        return metrics

    yield serve
    for metrics in made:
        metrics.close()


async def test_the_endpoint_shows_outcomes_and_refusals(served: Callable[..., RouterMetrics]) -> None:
    metrics = served()
    metrics.request_ended("finished")
    metrics.refused("OUT_OF_RANGE")

    status, text = await fetched(metrics, "/metrics")

    assert status == HTTPStatus.OK
    assert 'rachis_requests_total{outcome="finished"} 1.0' in text
    assert 'rachis_session_refusals_total{status="OUT_OF_RANGE"} 1.0' in text


async def test_live_and_ready_are_told_apart(served: Callable[..., RouterMetrics]) -> None:
    metrics = served("no decode worker is usable")

    assert await fetched(metrics, "/livez") == (HTTPStatus.OK, "the router answers\n")
    assert await fetched(metrics, "/readyz") == (HTTPStatus.SERVICE_UNAVAILABLE, "no decode worker is usable\n")
    assert await fetched(served(), "/readyz?verbose") == (HTTPStatus.OK, "requests are served\n")


async def test_other_paths_are_not_found(served: Callable[..., RouterMetrics]) -> None:
    status, text = await fetched(served(), "/healthz")

    assert (status, text) == (HTTPStatus.NOT_FOUND, "there are /metrics, /livez and /readyz\n")


def test_a_router_that_hangs_is_neither_live_nor_ready() -> None:
    loop = asyncio.new_event_loop()
    probes = Probes(loop, lambda: "", timeout_s=0.001)

    assert probes.live()[0] == probes.ready()[0] == HTTPStatus.SERVICE_UNAVAILABLE

    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def test_a_cluster_is_ready_while_a_decode_worker_is_usable(empty: Cluster) -> None:
    metrics = empty.router.metrics
    await empty.add(PREFILL)
    assert (await fetched(metrics, "/readyz"))[0] == HTTPStatus.SERVICE_UNAVAILABLE

    decode = (await empty.add(DECODE)).engine
    assert (await fetched(metrics, "/readyz"))[0] == HTTPStatus.OK

    decode.hold_before(2)
    running = asyncio.create_task(empty.generate())
    await decode.held.wait()
    stopping = asyncio.create_task(empty.router.stop())
    await asyncio.sleep(0)
    assert await fetched(metrics, "/readyz") == (HTTPStatus.SERVICE_UNAVAILABLE, "the service is stopping\n")
    assert (await fetched(metrics, "/livez"))[0] == HTTPStatus.OK
    decode.resume()
    await asyncio.gather(running, stopping)


def test_two_routers_count_apart() -> None:
    first, second = RouterMetrics(), RouterMetrics()
    first.request_ended("finished")
    assert second.registry.get_sample_value("rachis_requests_total", {"outcome": "finished"}) == 0


def test_what_alerts_go_by_stands_at_0_from_the_start() -> None:
    sample = RouterMetrics().registry.get_sample_value

    for outcome in OUTCOMES:
        assert sample("rachis_requests_total", {"outcome": outcome.value}) == 0
    for status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"):
        assert sample("rachis_request_errors_total", {"status": status}) == 0
    for handoff in ("pulled", "local", "recomputed", "none"):
        assert sample("rachis_handoffs_total", {"outcome": handoff}) == 0


@pytest.mark.parametrize("objective_s", [0.001, 0.3, 5.0, 500.0])
def test_the_share_of_requests_that_keep_the_objective_is_exact(objective_s: float) -> None:
    later_s = 7 * objective_s
    metrics = RouterMetrics(
        {
            RequestClass.INTERACTIVE: ClassObjectives(objective_s, objective_s),
            RequestClass.BEST_EFFORT: ClassObjectives(later_s, 0.0),
        },
        now_s=lambda: 100.0,
    )
    sample = metrics.registry.get_sample_value
    for share in (0.9, 1.0, 1.1, 1.5):
        metrics.first_token(share * objective_s, RequestTrace())
        metrics.first_token(share * later_s, RequestTrace(priority=1))
        answer = generation.Completion(usage=generation.Usage(completion_tokens=2))
        metrics.completed(answer, RequestTrace(first_token_s=100.0 - share * objective_s))

    def kept(figure: str, whose: str, bound_s: float) -> float | None:
        return sample(f"rachis_request_{figure}_seconds_bucket", {"class": whose, "le": str(bound_s)})

    assert (kept("ttft", "interactive", objective_s), kept("ttft", "interactive", 2 * objective_s)) == (2, 4)
    assert (kept("ttft", "best_effort", later_s), kept("ttft", "best_effort", 2 * later_s)) == (2, 4)
    assert kept("tpot", "interactive", 2 * objective_s) == 4
    assert sample("rachis_request_tpot_seconds_count", {"class": "best_effort"}) == 0


def test_what_best_effort_waits_counts_as_a_share_of_its_own_objective_for_pools_that_follow_their_load() -> None:
    metrics = RouterMetrics(
        {RequestClass.INTERACTIVE: ClassObjectives(2.0, 0.0), RequestClass.BEST_EFFORT: ClassObjectives(60.0, 0.0)},
        now_s=lambda: 0.0,
    )
    for _ in range(10):
        metrics.first_token(30.0, RequestTrace(priority=5))
    assert metrics.recent_ttft.kept_by_most(0.0) == 1.0


def test_an_answer_of_one_token_or_whose_first_token_came_elsewhere_has_no_tpot() -> None:
    metrics = RouterMetrics()
    one = generation.Completion(usage=generation.Usage(completion_tokens=1))
    metrics.completed(one, RequestTrace(first_token_s=1.0))
    metrics.completed(generation.Completion(usage=generation.Usage(completion_tokens=9)), RequestTrace())
    resumed = generation.Completion(usage=generation.Usage(completion_tokens=900))
    resumed.route.resumed_tokens = 800
    metrics.completed(resumed, RequestTrace(first_token_s=1.0))
    assert metrics.registry.get_sample_value("rachis_request_tpot_seconds_count", {"class": "interactive"}) == 0


async def test_a_request_counts_with_its_ttft_and_its_handoff(cluster: Cluster) -> None:
    await cluster.generate()
    await cluster.generate("hello", max_tokens=1)

    assert value(cluster, "request_ttft_seconds_count", **INTERACTIVE) == 2
    # One of them had one token only.
    assert value(cluster, "request_tpot_seconds_count", **INTERACTIVE) == 1
    assert value(cluster, "handoffs_total", outcome="pulled") == 1
    assert value(cluster, "handoffs_total", outcome="none") == 1
    assert value(cluster, "handoffs_total", outcome="recomputed") == 0


async def test_a_request_and_a_session_of_a_priority_above_0_count_as_best_effort(cluster: Cluster) -> None:
    await cluster.generate(priority=1)
    session = cluster.session()
    await session.open(priority=7)
    await session.finish()
    await session.answer()
    best_effort = {"class": "best_effort"}
    assert value(cluster, "request_ttft_seconds_count", **best_effort) == 2
    assert value(cluster, "request_tpot_seconds_count", **best_effort) == 2
    assert value(cluster, "request_ttft_seconds_count", **INTERACTIVE) == 0
    assert await read(cluster, "objective_ttft_seconds", **best_effort) == 5
    # And each of two choices.
    cluster.calls += 1
    prompt, sampling = generation.PromptInput(text="hello"), generation.SamplingParams(max_tokens=4)
    async for _ in cluster.api.Generate(api.GenerateRequest(prompt=prompt, sampling=sampling, priority=1, n=2)):
        pass
    assert value(cluster, "request_tpot_seconds_count", **best_effort) == 4


async def test_a_session_counts_with_its_ttft_from_its_finish(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open()
    await session.append(" again")
    await session.finish()
    answer = await session.answer()

    told_ms = answer[0].first_token.ttft_from_finish_ms
    assert value(cluster, "request_ttft_seconds_count", **INTERACTIVE) == 1
    assert value(cluster, "request_ttft_seconds_sum", **INTERACTIVE) == pytest.approx(told_ms / 1000)
    assert told_ms < answer[0].first_token.ttft_from_open_ms
    assert value(cluster, "handoffs_total", outcome="pulled") == 1


async def test_errors_are_told_apart_by_status(empty: Cluster) -> None:
    await empty.add(DECODE)
    await failure(empty.call(max_tokens=100_000))
    await failure(empty.call("defect"))

    assert value(empty, "request_errors_total", status="OUT_OF_RANGE") == 1
    assert value(empty, "request_errors_total", status="INTERNAL") == 1
    assert value(empty, "request_errors_total", status="RESOURCE_EXHAUSTED") == 0


async def test_a_router_that_is_full_shows_its_queue_and_what_it_refuses() -> None:
    async with running_cluster(router__max_in_flight_requests=1, router__max_queued_requests=1) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.hold_before(0)
        taken = [cluster.call(), cluster.call()]
        await until(lambda: cluster.parts.admission.queued == 1)
        await failure(cluster.call())

        assert await read(cluster, "router_in_flight_requests") == 1
        assert await read(cluster, "router_max_in_flight_requests") == 1
        assert await read(cluster, "router_queued_requests") == 1
        assert await read(cluster, "router_max_queued_requests") == 1
        assert value(cluster, "request_errors_total", status="RESOURCE_EXHAUSTED") == 1

        prefiller.resume()
        for call in taken:
            await collected(call)
        assert await read(cluster, "router_queued_requests") == 0


async def test_the_router_tells_its_version_its_objective_and_whether_redis_answers(cluster: Cluster) -> None:
    assert await read(cluster, "build_info", version=importlib.metadata.version("rachis")) == 1
    assert await read(cluster, "objective_ttft_seconds", **INTERACTIVE) == 5
    assert await read(cluster, "registry_connected") == 1


def test_pools_tell_what_they_are_meant_to_have_and_what_they_have() -> None:
    pools = [
        admin.PoolStatus(pool=PREFILL, desired_workers=3, minimum_workers=2, ready_workers=1, lost_workers=4),
        admin.PoolStatus(pool=DECODE, desired_workers=2, minimum_workers=1, ready_workers=2),
    ]
    assert samples(pool_metrics(pools)) == {
        ("pool_desired_workers", "prefill"): 3,
        ("pool_desired_workers", "decode"): 2,
        ("pool_minimum_workers", "prefill"): 2,
        ("pool_minimum_workers", "decode"): 1,
        ("pool_ready_workers", "prefill"): 1,
        ("pool_ready_workers", "decode"): 2,
        ("workers_lost_total", "prefill"): 4,
        ("workers_lost_total", "decode"): 0,
    }


def view(worker: str, *, pool: Any = PREFILL, node: str = "h1", **fields: Any) -> admin.WorkerView:
    record = wire.WorkerRegistration(
        worker_id=worker,
        pool=pool,
        node=node,
        state=fields.pop("state", wire.WORKER_STATE_READY),
        versions=wire.Versions(rachis="0.2.0", vllm="0.32.0", nixl="1.4.1"),
        clock_ahead_ms=-250,
    )
    return admin.WorkerView(registration=record, **fields)


def test_a_worker_is_usable_when_it_is_ready_trusted_and_of_a_version_that_fits() -> None:
    views = [
        view("prefill-0"),
        view("prefill-1", suspect=True),
        view("prefill-2", state=wire.WORKER_STATE_DRAINING),
        view("decode-0", pool=DECODE, node="h2", version_skew="vLLM is 0.31.0 there"),
    ]
    told = samples(registration_metrics(views))

    assert {key: figure for key, figure in told.items() if key[0] == "worker_usable"} == {
        ("worker_usable", "prefill-0", "prefill", "h1"): 1,
        ("worker_usable", "prefill-1", "prefill", "h1"): 0,
        ("worker_usable", "prefill-2", "prefill", "h1"): 0,
        ("worker_usable", "decode-0", "decode", "h2"): 0,
    }
    assert told["worker_versions_info", "prefill-0", "0.2.0", "0.32.0", "1.4.1"] == 1
    assert (told["worker_version_skew", "prefill-0"], told["worker_version_skew", "decode-0"]) == (0, 1)
    assert told["worker_clock_ahead_seconds", "prefill-0"] == -0.25


def test_a_worker_that_does_not_answer_has_no_load_and_one_that_does_has_it() -> None:
    load = wire.WorkerLoad(running_requests=3, waiting_requests=2, leased_handoffs=1)
    counters = wire.WorkerCounters(
        resident_bytes=4096, handoffs_expired=5, handoffs_mismatched=1, handoffs_verified=9, log_lines_lost=6
    )

    assert samples(worker_metrics([view("prefill-0"), view("prefill-1", load=load, counters=counters)])) == {
        ("worker_requests", "prefill-1", "running"): 3,
        ("worker_requests", "prefill-1", "waiting"): 2,
        ("worker_leased_handoffs", "prefill-1"): 1,
        ("worker_quarantined_blocks", "prefill-1"): 0,
        ("worker_resident_bytes", "prefill-1"): 4096,
        ("handoffs_expired_total", "prefill-1"): 5,
        ("handoffs_mismatched_total", "prefill-1"): 1,
        ("handoffs_verified_total", "prefill-1"): 9,
        ("worker_log_lines_lost_total", "prefill-1"): 6,
    }


def test_the_memory_of_a_node_is_told_once() -> None:
    counters = wire.WorkerCounters(node_memory_bytes=1 << 34, node_available_bytes=1 << 33)
    views = [view("prefill-0", counters=counters), view("prefill-1", counters=counters), view("decode-0", node="h2")]

    assert samples(node_metrics(views)) == {
        ("node_memory_bytes", "h1"): 1 << 34,
        ("node_available_bytes", "h1"): 1 << 33,
    }


def samples(metrics: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("rachis_"), *sample.labels.values()): sample.value
        for metric in metrics
        for sample in metric.samples
    }
