"""Sessions whose client leaves, falls silent or runs out of time, and those that end in the router itself.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import asyncio

import grpc
import pytest
from rachis.v1 import router_pb2 as api

from control_plane.model.lifecycle import State
from tests.fakes.answers import session_text, text_of
from tests.fakes.cluster import (
    CLIENT_DEADLINE_S,
    DECODE,
    PREFILL,
    SESSION_DEADLINE_S,
    Cluster,
    named,
    running_cluster,
    until,
)
from tests.fakes.session_call import session_open

# The client.


async def test_a_cancel_ends_the_session_and_frees_the_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" world")
    await session.send(cancel=api.SessionCancel())

    error = await session.failure()

    assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "the client cancelled the session")
    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_a_cancel_after_finish_ends_the_session_and_frees_both_workers(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    session = cluster.session()
    await session.open("hello", max_tokens=100)
    await session.finish()
    await decoder.held.wait()
    await session.send(cancel=api.SessionCancel())

    error = await session.failure()

    assert error.code() is grpc.StatusCode.CANCELLED
    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_a_client_that_closes_its_side_without_finish_has_cancelled(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.call.done_writing()

    error = await session.failure()

    assert error.code() is grpc.StatusCode.CANCELLED
    assert error.details() == "the client closed its side of the stream before `finish`"
    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


@pytest.mark.parametrize("inputs", [0, 3])
async def test_a_client_that_is_gone_frees_the_worker(cluster: Cluster, inputs: int) -> None:
    session = cluster.session()
    await session.open("hello")
    for _ in range(inputs):
        await session.append(" world")
    engine = named(cluster, "prefill-0").engine
    await until(lambda: engine.status().load.running_requests == 1)

    session.call.cancel()

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_a_client_that_is_gone_during_the_prefill_of_its_answer_frees_the_worker(cluster: Cluster) -> None:
    engine = named(cluster, "prefill-0").engine
    engine.hold_before(0)
    session = cluster.session()
    await session.open("hello")
    await session.finish()
    await engine.held.wait()

    session.call.cancel()

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_a_silent_client_is_ended_after_the_idle_time() -> None:
    async with running_cluster(streaming__idle_timeout_s=2.0) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        session = cluster.session()
        await session.open("hello")

        error = await session.failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no input came for 2 s" in (error.details() or "")
        await until(cluster.idle)
        await cluster.ends_with({State.EXPIRED: 1})


async def test_a_client_that_never_opens_is_ended_soon() -> None:
    async with running_cluster(streaming__open_timeout_s=2.0) as cluster:
        await cluster.add(DECODE)

        error = await cluster.session().failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no input came for 2 s, the limit is streaming.open_timeout_s" in (error.details() or "")
        await until(cluster.idle)
        await cluster.ends_with({State.EXPIRED: 1})


async def test_waiting_for_the_answer_is_not_idle() -> None:
    async with running_cluster(streaming__idle_timeout_s=3.0) as cluster:
        await cluster.add(PREFILL)
        engine = (await cluster.add(DECODE)).engine
        engine.hold_before(3)
        session = cluster.session()
        await session.open("hello")
        await session.finish()
        await engine.held.wait()

        await asyncio.sleep(3.5)
        engine.resume()

        assert text_of(await session.answer()) == session_text("hello")


async def test_the_clients_deadline_ends_an_open_session(cluster: Cluster) -> None:
    session = cluster.session(timeout_s=SESSION_DEADLINE_S)
    await session.open("hello")

    error = await session.failure()

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(cluster.idle)
    await cluster.ends_with({State.EXPIRED: 1})


async def test_the_routers_deadline_ends_an_open_session() -> None:
    async with running_cluster(router__request_timeout_s=SESSION_DEADLINE_S) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        session = cluster.session()
        await session.open("hello")

        error = await session.failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        await cluster.ends_with({State.EXPIRED: 1})


async def test_the_routers_deadline_ends_a_session_that_waits_for_its_slot() -> None:
    async with running_cluster(
        router__max_in_flight_requests=1, router__request_timeout_s=CLIENT_DEADLINE_S, router__queue_timeout_s=20
    ) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        admission = cluster.parts.admission
        async with admission.slot():
            session = cluster.session()
            await session.send(open=session_open("hello", "APPEND"))

            error = await session.failure()

            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error.details() == "the session's deadline passed"
            assert (admission.in_flight, admission.queued) == (1, 0)
            await cluster.ends_with({State.EXPIRED: 1})
        admission.check_invariants()


# The router.


async def test_a_defect_ends_the_session_as_internal_and_frees_the_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append("defect")

    error = await session.failure()

    assert error.code() is grpc.StatusCode.INTERNAL
    await until(cluster.idle)
    await cluster.ends_with({State.FAILED: 1})


async def test_a_cancel_while_the_session_waits_for_its_slot_leaves_the_queue() -> None:
    async with running_cluster(router__max_in_flight_requests=1) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.compute_at_most(2)
        first = cluster.session()
        await first.open("hello")
        queued = cluster.session()
        await queued.send(open=session_open("hello", "APPEND"))
        await until(lambda: cluster.parts.admission.queued == 1)

        queued.call.cancel()

        await until(lambda: cluster.outcomes == {State.CANCELLED: 1})
        prefiller.resume()
        await first.finish()
        assert text_of(await first.answer()) == session_text("hello")
