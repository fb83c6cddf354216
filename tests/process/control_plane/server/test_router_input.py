"""What the router takes in: requests that wait, the queue and its limits, bad input.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.engine_jobs import StructuredOutputs
from control_plane.model.lifecycle import State
from tests.fakes.answers import collected, failure, field_of, retry_after_ms, text_of, whole_text
from tests.fakes.cluster import CLIENT_DEADLINE_S, DECODE, PREFILL, Cluster, running_cluster, until
from tests.fakes.session_call import session_open

# Waiting.


async def test_a_cancel_while_queued_leaves_the_queue() -> None:
    async with running_cluster(router__max_in_flight_requests=1) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.hold_before(0)
        running = cluster.call()
        await prefiller.held.wait()
        queued = cluster.call()
        await until(lambda: cluster.parts.admission.queued == 1)

        queued.cancel()

        await until(lambda: cluster.outcomes == {State.CANCELLED: 1})
        prefiller.resume()
        assert text_of(await collected(running)) == whole_text()
        assert len(prefiller.jobs) == 1


async def test_the_routers_own_deadline_passes_in_the_queue_too() -> None:
    async with running_cluster(
        router__max_in_flight_requests=1, router__request_timeout_s=CLIENT_DEADLINE_S, router__queue_timeout_s=20
    ) as cluster:
        engines = [(await cluster.add(pool)).engine for pool in (PREFILL, DECODE)]
        admission = cluster.parts.admission
        async with admission.slot():
            error = await failure(cluster.call())

            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error.details() == "the request's deadline passed while it waited for a place"
            assert (admission.in_flight, admission.queued) == (1, 0)
            await cluster.ends_with({State.EXPIRED: 1})
        assert [engine.jobs for engine in engines] == [[], []]
        admission.check_invariants()


async def test_who_waits_in_the_queue_for_longer_than_one_may_is_refused_before_its_deadline() -> None:
    async with running_cluster(router__max_in_flight_requests=1, router__queue_timeout_s=0.1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        async with cluster.parts.admission.slot():
            error = await failure(cluster.call())

            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "waited 0.1 s for a place" in (error.details() or "")
            await cluster.ends_with({State.REFUSED: 1})


async def test_without_a_decode_worker_a_request_ends_after_the_bounded_wait() -> None:
    async with running_cluster(router__queue_timeout_s=0.05) as cluster:
        prefiller = await cluster.add(PREFILL)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_ms(error) > 0
        assert prefiller.engine.jobs == []
        await until(cluster.idle)
        await cluster.ends_with({State.FAILED: 1})


async def test_a_request_that_waits_takes_the_decode_worker_that_joins(empty: Cluster) -> None:
    await empty.add(PREFILL)
    call = empty.call()
    await until(lambda: empty.parts.admission.in_flight == 1)

    await empty.add(DECODE)

    assert text_of(await collected(call)) == whole_text()


async def test_a_request_waits_for_the_first_worker_to_register(empty: Cluster) -> None:
    call = empty.call()
    await until(lambda: empty.parts.router.waiting_for_first_worker == 1)
    status = await empty.admin.GetRouterStatus(admin.GetRouterStatusRequest())
    assert (status.in_flight_requests, status.queued_requests) == (0, 1)

    await empty.add(DECODE)

    assert text_of(await collected(call)) == whole_text()


async def test_the_text_of_a_request_that_waits_for_a_worker_is_counted_and_given_back(empty: Cluster) -> None:
    prompts = empty.parts.admission.prompts
    call = empty.call("x" * 10_000)
    await until(lambda: prompts.used_bytes > 9_900)
    call.cancel()
    await until(lambda: prompts.used_bytes == 0)


async def test_best_effort_that_waits_leaves_memory_for_the_prompts_of_others() -> None:
    text = "x" * 400_000
    async with running_cluster(router__max_prompt_mib=1) as empty:
        prompts = empty.parts.admission.prompts
        waiting = [empty.call(text, priority=1)]
        await until(lambda: prompts.used_bytes > 390_000)

        refused = await failure(empty.call(text, priority=2))
        assert "router.best_effort_share" in (refused.details() or "")
        assert retry_after_ms(refused) is not None
        session = empty.session()
        await session.send(open=session_open(text, "APPEND", priority=1))
        assert "router.best_effort_share" in ((await session.failure()).details() or "")

        waiting.append(empty.call(text))
        await until(lambda: prompts.used_bytes > 790_000)
        for call in waiting:
            call.cancel()
        await until(lambda: prompts.used_bytes == 0)
        prompts.check_invariants()


async def test_a_router_that_stops_lets_go_who_waits_for_a_worker() -> None:
    async with running_cluster(router__queue_timeout_s=600, router__drain_timeout_s=20) as empty:
        call = empty.call("x" * 1000)
        await until(lambda: empty.parts.admission.prompts.used_bytes > 0)
        stopping = asyncio.create_task(empty.router.stop())
        # Not cut off at the end of the drain.
        assert (await failure(call)).details() == "no worker has registered yet"
        await stopping


async def test_where_no_worker_registers_a_request_is_told_to_come_back() -> None:
    async with running_cluster(router__queue_timeout_s=0.3, router__max_queued_requests=1) as empty:
        waiting, refused = empty.call(), empty.call()
        for call in (waiting, refused):
            error = await failure(call)
            assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)
            assert error.details() == "no worker has registered yet"


async def test_a_full_queue_is_refused_with_a_hint_and_the_rest_finish() -> None:
    async with running_cluster(router__max_in_flight_requests=1, router__max_queued_requests=1) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.hold_before(0)
        taken = [cluster.call(), cluster.call()]
        await prefiller.held.wait()
        await until(lambda: cluster.parts.admission.queued == 1)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 100 <= retry_after_ms(error) <= 30_000
        prefiller.resume()
        assert [text_of(await collected(call)) for call in taken] == [whole_text()] * 2
        await until(cluster.idle)
        await cluster.ends_with({State.REFUSED: 1, State.FINISHED: 2})


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


async def test_a_message_over_the_limit_is_out_of_range() -> None:
    async with running_cluster(router__max_message_mib=1) as cluster:
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
    await cluster.ends_with({State.REFUSED: 1})
    assert all(worker.engine.jobs == [] for worker in cluster.workers)


async def test_a_defect_of_the_router_counts_as_failed(cluster: Cluster) -> None:
    await failure(cluster.call("defect"))

    await until(cluster.idle)
    await cluster.ends_with({State.FAILED: 1})


async def test_a_defect_of_the_router_answers_internal(cluster: Cluster) -> None:
    error = await failure(cluster.call("defect"))

    assert error.code() is grpc.StatusCode.INTERNAL


async def test_a_grammar_that_does_not_compile_is_refused_before_any_worker_hears_of_it(cluster: Cluster) -> None:
    error = await failure(cluster.call(structured_outputs=generation.StructuredOutputs(regex="bad (")))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling.structured_outputs.regex: unbalanced parenthesis"
    assert field_of(error) == "sampling.structured_outputs.regex"
    assert all(worker.engine.jobs == [] for worker in cluster.workers)
    error = await failure(cluster.call(structured_outputs=generation.StructuredOutputs(regex="slow"), timeout_s=1))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.ends_with({State.REFUSED: 1, State.EXPIRED: 1})


async def test_what_an_answer_has_to_be_goes_to_both_workers(cluster: Cluster) -> None:
    wanted = generation.StructuredOutputs(choice=["a", "b"])
    assert text_of(await cluster.generate(structured_outputs=wanted, bad_words=["c"])) == whole_text()
    specs = [job.sampling for worker in cluster.workers for job in worker.engine.jobs]
    assert [(each.structured_outputs, each.bad_words) for each in specs] == [
        (StructuredOutputs(choice=("a", "b")), ("c",))
    ] * 2
