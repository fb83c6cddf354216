"""A request's whole way through the real router and the real workers' services, over fake engines, on loopback.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.engine import SamplingSpec
from control_plane.request import State
from tests.fakes.cluster import Cluster, Worker, running_cluster, until
from tests.fakes.engine import KV_BYTES_PER_TOKEN, expected_text

PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
HELLO = tuple(b"hello")


def whole_text(max_tokens: int = 8, seed: int | None = None) -> str:
    """What one engine alone answers to `hello`."""
    return expected_text(
        HELLO, SamplingSpec(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)
    )


@pytest.fixture
async def empty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with running_cluster(monkeypatch) as cluster:
        yield cluster


@pytest.fixture
async def cluster(empty: Cluster) -> Cluster:
    """One prefill and one decode worker."""
    await empty.add(PREFILL)
    await empty.add(DECODE)
    return empty


@pytest.fixture
async def cluster_2x2(empty: Cluster) -> Cluster:
    for pool in (PREFILL, PREFILL, DECODE, DECODE):
        await empty.add(pool)
    return empty


def named(cluster: Cluster, name: str) -> Worker:
    return next(worker for worker in cluster.workers if worker.name == name)


def text_of(responses: list[api.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def tokens_of(responses: list[api.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]


def completion_of(responses: list[api.GenerateResponse]) -> generation.Completion:
    """The one completion, which is last."""
    assert [response.WhichOneof("event") for response in responses] == ["delta"] * (len(responses) - 1) + ["completion"]
    return responses[-1].completion


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def trailer(error: grpc.aio.AioRpcError, key: str) -> Any:
    metadata: Any = error.trailing_metadata()
    return dict(metadata)[key]


def retry_after_ms(error: grpc.aio.AioRpcError) -> int:
    return int(trailer(error, "retry-after-ms"))


def field_of(error: grpc.aio.AioRpcError) -> str:
    bad = BadRequest()
    assert Status.FromString(trailer(error, "grpc-status-details-bin")).details[0].Unpack(bad)
    return str(bad.field_violations[0].field)


# The way through.


async def test_a_request_is_prefilled_handed_off_and_decoded_into_one_completion(cluster: Cluster) -> None:
    responses = await cluster.generate(request_id="mine")

    completion = completion_of(responses)
    assert text_of(responses) == whole_text()
    assert tokens_of(responses) == [ord(letter) for letter in whole_text()]
    assert {response.request_id for response in responses} == {"mine"}
    assert completion.finish_reason == generation.FINISH_REASON_LENGTH
    assert completion.usage == generation.Usage(prompt_tokens=5, completion_tokens=8, cached_tokens=0)
    assert completion.route == generation.Route(
        prefill_worker_id="prefill-0",
        decode_worker_id="decode-0",
        handoff=generation.HANDOFF_OUTCOME_PULLED,
        kv_bytes=5 * KV_BYTES_PER_TOKEN,
        pulled_tokens=5,
    )
    assert cluster.outcomes == {State.FINISHED: 1}


async def test_timings_are_set_and_fit_together(cluster: Cluster) -> None:
    timings = completion_of(await cluster.generate()).timings

    assert timings.transfer_ms == 0.5
    assert min(timings.queue_ms, timings.prefill_ms, timings.decode_ms) >= 0
    assert timings.ttft_ms > 0
    assert timings.queue_ms + timings.prefill_ms == pytest.approx(timings.ttft_ms, abs=1e-6)


async def test_the_first_token_leaves_before_the_decode_worker_has_begun(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(0)
    responses = aiter(cluster.call())

    first = await anext(responses)
    await decoder.held.wait()

    assert (first.delta.text, len(first.delta.token_ids)) == (whole_text()[0], 1)
    decoder.resume()
    assert first.delta.text + text_of([response async for response in responses]) == whole_text()


async def test_seeded_sampling_goes_on_where_the_prefill_worker_left_it(cluster: Cluster) -> None:
    assert text_of(await cluster.generate(temperature=1.0, seed=7)) == whole_text(seed=7)


async def test_a_request_for_one_token_never_reaches_a_decode_worker(cluster: Cluster) -> None:
    completion = completion_of(await cluster.generate(max_tokens=1))

    assert completion.usage.completion_tokens == 1
    assert completion.route == generation.Route(prefill_worker_id="prefill-0", handoff=generation.HANDOFF_OUTCOME_NONE)
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_request_that_stops_at_its_first_token_ends_there(cluster: Cluster) -> None:
    responses = await cluster.generate(stop_token_ids=[ord(whole_text()[0])])

    assert completion_of(responses).finish_reason == generation.FINISH_REASON_STOP
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_stop_string_over_the_hand_off_is_never_shown(cluster: Cluster) -> None:
    text = whole_text()

    responses = await cluster.generate(stop=[text[:2]])

    assert text_of(responses) == ""
    assert completion_of(responses).finish_reason == generation.FINISH_REASON_STOP
    assert named(cluster, "decode-0").engine.jobs != []


async def test_text_held_back_for_a_stop_string_comes_with_the_next_delta(cluster: Cluster) -> None:
    responses = await cluster.generate(stop=["never so"])

    assert (responses[0].delta.text, len(responses[0].delta.token_ids)) == ("", 1)
    assert text_of(responses) == whole_text()


async def test_logprobs_come_for_every_token_on_both_sides_of_the_hand_off(cluster: Cluster) -> None:
    responses = await cluster.generate(logprobs=2)

    rows = [row for response in responses for row in response.delta.logprobs]
    assert [row.sampled.token_id for row in rows] == tokens_of(responses)
    assert all(len(row.top) == 2 for row in rows)


async def test_a_hand_off_past_its_deadline_is_recomputed_and_its_lease_released(empty: Cluster) -> None:
    prefiller = await empty.add(PREFILL, deadline_s=0.0)
    await empty.add(DECODE)

    responses = await empty.generate()

    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    await until(lambda: prefiller.engine.status().counters.handoffs_released == 1)


async def test_requests_spread_over_idle_workers(cluster_2x2: Cluster) -> None:
    for worker in cluster_2x2.workers:
        worker.engine.hold_before(3)
    first = cluster_2x2.call()
    await named(cluster_2x2, "decode-0").engine.held.wait()

    second = cluster_2x2.call()
    await named(cluster_2x2, "decode-1").engine.held.wait()

    for worker in cluster_2x2.workers:
        worker.engine.resume()
    routes = [completion_of([response async for response in call]).route for call in (first, second)]
    assert [route.decode_worker_id for route in routes] == ["decode-0", "decode-1"]


async def test_two_requests_under_one_name_do_not_disturb_each_other(cluster: Cluster) -> None:
    prefiller = named(cluster, "prefill-0").engine
    prefiller.hold_before(0)
    calls = [cluster.call(request_id="same"), cluster.call(request_id="same")]
    await until(lambda: len(prefiller.jobs) == 2)
    prefiller.resume()

    answers = await asyncio.gather(*(_collected(call) for call in calls))

    assert [text_of(answer) for answer in answers] == [whole_text()] * 2


async def _collected(call: Any) -> list[api.GenerateResponse]:
    return [response async for response in call]


# Cancelling and deadlines.


async def test_a_cancel_while_prefilling_frees_the_prefill_worker(cluster: Cluster) -> None:
    prefiller = named(cluster, "prefill-0").engine
    prefiller.hold_before(0)
    call = cluster.call()
    await prefiller.held.wait()

    call.cancel()

    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_cancel_while_decoding_frees_both_workers(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    call = cluster.call(max_tokens=100)
    await decoder.held.wait()
    assert decoder.status().load.free_blocks < decoder.status().load.total_blocks

    call.cancel()

    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}


async def test_a_lease_that_a_decode_worker_was_told_of_is_released_only_when_it_cannot_pull_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_cluster(monkeypatch, handoff__deadline_s=0.3) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await (await cluster.add(DECODE)).crash()
        call = cluster.call()
        assert (await call.read()).delta.token_ids
        first_token_s = monotonic_s()
        leased = prefiller.status
        await until(lambda: leased().load.leased_handoffs == 1 and not cluster.router.membership.usable(DECODE))

        call.cancel()

        await until(cluster.idle)
        assert leased().counters.handoffs_released == 1
        assert monotonic_s() - first_token_s > 0.25
        assert cluster.outcomes == {State.CANCELLED: 1}


async def test_a_cancel_while_queued_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(monkeypatch, router__max_in_flight_requests=1) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.hold_before(0)
        running = cluster.call()
        await prefiller.held.wait()
        queued = cluster.call()
        await until(lambda: cluster.router._admin._admission.queued == 1)

        queued.cancel()

        await until(lambda: cluster.outcomes == {State.CANCELLED: 1})
        prefiller.resume()
        assert text_of(await _collected(running)) == whole_text()
        assert len(prefiller.jobs) == 1


async def test_the_clients_deadline_ends_a_decode_and_frees_both_workers(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)

    error = await failure(cluster.call(timeout_s=0.15))

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(cluster.idle)


async def test_a_request_whose_deadline_passed_counts_as_expired(cluster: Cluster) -> None:
    named(cluster, "decode-0").engine.hold_before(4)

    for _ in range(3):
        await failure(cluster.call(timeout_s=0.05))

    await until(cluster.idle)
    assert cluster.outcomes == {State.EXPIRED: 3}


@pytest.mark.parametrize("held", ["prefill-0", "decode-0"])
async def test_the_routers_own_deadline_ends_a_request_without_one(monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    async with running_cluster(monkeypatch, router__request_timeout_s=0.1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        named(cluster, held).engine.hold_before(0)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        assert cluster.outcomes == {State.EXPIRED: 1}


async def test_a_deadline_that_passes_while_waiting_for_a_decode_worker_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_cluster(monkeypatch, router__request_timeout_s=0.05) as cluster:
        await cluster.add(PREFILL)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Lost workers.


async def test_a_prefill_worker_that_is_lost_is_replaced_by_the_second(cluster_2x2: Cluster) -> None:
    await named(cluster_2x2, "prefill-0").crash()

    responses = await cluster_2x2.generate()

    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.prefill_worker_id == "prefill-1"
    member = cluster_2x2.router.membership.get("prefill-0")
    assert member is not None
    assert member.suspect_since_s is not None


async def test_a_prefill_engine_that_dies_under_a_request_is_replaced(cluster_2x2: Cluster) -> None:
    prefiller = named(cluster_2x2, "prefill-0").engine
    prefiller.hold_before(0)
    call = cluster_2x2.call()
    await prefiller.held.wait()

    prefiller.die("of a test")

    responses = await _collected(call)
    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.prefill_worker_id == "prefill-1"


async def test_the_decode_worker_prefills_itself_when_the_only_prefill_worker_is_lost(cluster: Cluster) -> None:
    await named(cluster, "prefill-0").crash()

    responses = await cluster.generate()

    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.prefill_worker_id, route.decode_worker_id) == ("", "decode-0")
    assert route.handoff == generation.HANDOFF_OUTCOME_NONE


async def test_the_decode_worker_prefills_itself_when_there_is_no_prefill_worker(empty: Cluster) -> None:
    await empty.add(DECODE)

    responses = await empty.generate()

    assert text_of(responses) == whole_text()
    completion = completion_of(responses)
    assert completion.usage.completion_tokens == 8
    assert (completion.route.prefill_worker_id, completion.route.decode_worker_id) == ("", "decode-0")


async def test_a_decode_worker_lost_before_it_began_is_replaced_by_one_that_computes_the_prompt(
    cluster_2x2: Cluster,
) -> None:
    """Not by one that pulls: the first may have used the lease up, and its blocks may be another prompt's by now."""
    await named(cluster_2x2, "decode-0").crash()

    responses = await cluster_2x2.generate()

    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.decode_worker_id, route.handoff) == ("decode-1", generation.HANDOFF_OUTCOME_RECOMPUTED)
    assert [job.pull for job in named(cluster_2x2, "decode-1").engine.jobs] == [None]


async def test_a_decode_worker_lost_after_it_began_ends_the_request_with_a_hint(cluster_2x2: Cluster) -> None:
    decoder = named(cluster_2x2, "decode-0").engine
    decoder.hold_before(4)
    call = cluster_2x2.call()
    await decoder.held.wait()

    decoder.die("of a test")

    error = await failure(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "decode-0" in (error.details() or "")
    assert retry_after_ms(error) == 1000
    await until(cluster_2x2.idle)
    assert cluster_2x2.outcomes == {State.FAILED: 1}
    assert named(cluster_2x2, "decode-1").engine.jobs == []


async def test_a_decode_worker_whose_process_ends_under_a_request_ends_it_with_a_hint(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0")
    decoder.engine.hold_before(4)
    call = cluster.call()
    await decoder.engine.held.wait()

    await decoder.crash()

    error = await failure(call)
    assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)
    assert cluster.router.membership.usable(DECODE) == []


async def test_without_a_decode_worker_a_request_ends_after_the_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(monkeypatch, router__queue_timeout_s=0.05) as cluster:
        prefiller = await cluster.add(PREFILL)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_ms(error) > 0
        assert prefiller.engine.jobs == []
        await until(cluster.idle)
        assert cluster.outcomes == {State.FAILED: 1}


async def test_a_request_that_waits_takes_the_decode_worker_that_joins(empty: Cluster) -> None:
    await empty.add(PREFILL)
    call = empty.call()
    await until(lambda: empty.router._admin._admission.in_flight == 1)

    await empty.add(DECODE)

    assert text_of(await _collected(call)) == whole_text()


async def test_a_request_that_lost_its_decode_worker_goes_on_when_that_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_cluster(monkeypatch, router__queue_timeout_s=0.5) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await (await cluster.add(DECODE)).crash()
        call = cluster.call()
        await until(lambda: bool(prefiller.jobs) and not cluster.router.membership.usable(DECODE))

        await cluster.add(DECODE, "decode-0", number=2)

        assert text_of(await _collected(call)) == whole_text()


async def test_before_any_worker_registered_a_request_is_told_to_come_back(empty: Cluster) -> None:
    error = await failure(empty.call())

    assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)


async def test_a_worker_of_another_generation_refuses_and_the_next_one_serves(cluster_2x2: Cluster) -> None:
    for name in ("prefill-0", "decode-0"):
        stale = wire.WorkerRegistration()
        stale.CopyFrom(named(cluster_2x2, name).record)
        stale.generation = 99
        await cluster_2x2.register(stale)

    route = completion_of(await cluster_2x2.generate()).route

    assert (route.prefill_worker_id, route.decode_worker_id) == ("prefill-1", "decode-1")
    assert named(cluster_2x2, "prefill-0").engine.jobs == named(cluster_2x2, "decode-0").engine.jobs == []


# Admission.


async def test_a_full_queue_is_refused_with_a_hint_and_the_rest_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(monkeypatch, router__max_in_flight_requests=1, router__max_queued_requests=1) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.hold_before(0)
        taken = [cluster.call(), cluster.call()]
        await prefiller.held.wait()
        await until(lambda: cluster.router._admin._admission.queued == 1)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 100 <= retry_after_ms(error) <= 30_000
        prefiller.resume()
        assert [text_of(await _collected(call)) for call in taken] == [whole_text()] * 2
        await until(cluster.idle)
        assert cluster.outcomes == {State.REFUSED: 1, State.FINISHED: 2}


async def test_many_requests_at_once_all_get_their_own_answer(cluster_2x2: Cluster) -> None:
    prompts = [f"prompt {number}" for number in range(40)]

    answers = await asyncio.gather(*(cluster_2x2.generate(prompt) for prompt in prompts))

    spec = SamplingSpec(max_tokens=8, temperature=0.0)
    assert [text_of(answer) for answer in answers] == [
        expected_text(tuple(prompt.encode()), spec) for prompt in prompts
    ]
    assert cluster_2x2.outcomes == {State.FINISHED: 40}


# Bad input.


async def raw_call(cluster: Cluster, data: bytes) -> grpc.aio.AioRpcError:
    return await failure(cluster.channel.unary_stream("/rachis.v1.RouterService/Generate", None, None)(data))


async def test_a_prompt_that_is_no_utf8_is_refused_under_its_name(cluster: Cluster) -> None:
    good = api.GenerateRequest(prompt=generation.PromptInput(text="good")).SerializeToString()

    error = await raw_call(cluster, good.replace(b"good", b"\xff\xfe\xfd\xfc"))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details(), field_of(error)) == ("prompt.text: is not valid UTF-8", "prompt.text")


async def test_bytes_that_are_no_message_are_refused(cluster: Cluster) -> None:
    error = await raw_call(cluster, b"\xff\xff\xff")

    assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "request")


async def test_a_message_over_the_limit_is_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(monkeypatch, router__max_message_mib=1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)

        error = await raw_call(cluster, api.GenerateRequest(model="m" * (1 << 20)).SerializeToString())

        assert (error.code(), field_of(error)) == (grpc.StatusCode.OUT_OF_RANGE, "request")
        assert "the limit is 1048576" in (error.details() or "")
        assert text_of(await cluster.generate()) == whole_text()


@pytest.mark.parametrize(
    ("text", "sampling", "code", "field"),
    [
        ("", {}, grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        ("hi", {"temperature": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature"),
        ("x" * 512, {}, grpc.StatusCode.OUT_OF_RANGE, "prompt"),
        ("hi", {"max_tokens": 511}, grpc.StatusCode.OUT_OF_RANGE, "sampling.max_tokens"),
    ],
)
async def test_bad_input_is_refused_before_any_worker_hears_of_it(
    cluster: Cluster, text: str, sampling: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    error = await failure(cluster.call(text, **sampling))

    assert (error.code(), field_of(error)) == (code, field)
    await until(cluster.idle)
    assert cluster.outcomes == {State.REFUSED: 1}
    assert all(worker.engine.jobs == [] for worker in cluster.workers)


async def test_a_defect_of_the_router_counts_as_failed(cluster: Cluster) -> None:
    await failure(cluster.call("defect"))

    await until(cluster.idle)
    assert cluster.outcomes == {State.FAILED: 1}


async def test_a_defect_of_the_router_answers_internal(cluster: Cluster) -> None:
    error = await failure(cluster.call("defect"))

    assert error.code() is grpc.StatusCode.INTERNAL


async def test_streaming_sessions_are_unimplemented(cluster: Cluster) -> None:
    error = await failure(cluster.api.StreamGenerate(iter([api.StreamGenerateRequest(cancel=api.SessionCancel())])))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


# Health, operators, stopping.


async def health_of(cluster: Cluster, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def until_health(cluster: Cluster, status: int) -> None:
    async with asyncio.timeout(5):
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
    watch = health_pb2_grpc.HealthStub(empty.channel).Watch(health_pb2.HealthCheckRequest(), timeout=5)

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
    await _collected(call)


async def test_a_worker_that_does_not_answer_is_listed_without_load(cluster: Cluster) -> None:
    await named(cluster, "decode-0").crash()

    views = (await cluster.admin.ListWorkers(admin.ListWorkersRequest())).workers

    assert [(view.registration.worker_id, view.HasField("load")) for view in views] == [
        ("decode-0", False),
        ("prefill-0", True),
    ]


async def test_a_drained_worker_ends_what_it_runs_and_gets_nothing_new_until_resumed(cluster_2x2: Cluster) -> None:
    drained = named(cluster_2x2, "decode-0")
    drained.engine.hold_before(4)
    running = cluster_2x2.call()
    await drained.engine.held.wait()

    response = await cluster_2x2.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))

    assert response.state == wire.WORKER_STATE_DRAINING
    await until(lambda: [worker.worker_id for worker in cluster_2x2.router.membership.usable(DECODE)] == ["decode-1"])
    routes = [completion_of(await cluster_2x2.generate()).route for _ in range(3)]
    assert {route.decode_worker_id for route in routes} == {"decode-1"}
    drained.engine.resume()
    assert completion_of(await _collected(running)).route.decode_worker_id == "decode-0"

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


async def test_the_configuration_in_force_is_shown_with_sources_and_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(monkeypatch, redis__url="redis://:hush@host/0") as cluster:
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

    assert text_of(await _collected(call)) == whole_text()
    await stopping
