"""What goes wrong around a session: its client leaves or falls silent, workers are lost, drain, or are not there.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import asyncio
import functools

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from control_plane.model.lifecycle import State
from tests.fakes.cluster import (
    DECODE,
    PREFILL,
    Cluster,
    named,
    retry_after_ms,
    running_cluster,
    session_open,
    session_text,
    text_of,
    until,
)

# The client.


async def test_a_cancel_ends_the_session_and_frees_the_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" world")
    await session.send(cancel=api.SessionCancel())

    error = await session.failure()

    assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "the client cancelled the session")
    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}


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
    assert cluster.outcomes == {State.CANCELLED: 1}


async def test_a_client_that_closes_its_side_without_finish_has_cancelled(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.call.done_writing()

    error = await session.failure()

    assert error.code() is grpc.StatusCode.CANCELLED
    assert error.details() == "the client closed its side of the stream before `finish`"
    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}


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
    assert cluster.outcomes == {State.CANCELLED: 1}


async def test_a_client_that_is_gone_during_the_prefill_of_its_answer_frees_the_worker(cluster: Cluster) -> None:
    engine = named(cluster, "prefill-0").engine
    engine.hold_before(0)
    session = cluster.session()
    await session.open("hello")
    await session.finish()
    await engine.held.wait()

    session.call.cancel()

    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}


async def test_a_silent_client_is_ended_after_the_idle_time() -> None:
    async with running_cluster(streaming__idle_timeout_s=0.1) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        session = cluster.session()
        await session.open("hello")

        error = await session.failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no input came for 0.1 s" in (error.details() or "")
        await until(cluster.idle)
        assert cluster.outcomes == {State.EXPIRED: 1}


async def test_a_client_that_never_opens_is_ended_after_the_idle_time() -> None:
    async with running_cluster(streaming__idle_timeout_s=0.1) as cluster:
        await cluster.add(DECODE)

        error = await cluster.session().failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        assert cluster.outcomes == {State.EXPIRED: 1}


async def test_waiting_for_the_answer_is_not_idle() -> None:
    async with running_cluster(streaming__idle_timeout_s=0.1) as cluster:
        await cluster.add(PREFILL)
        engine = (await cluster.add(DECODE)).engine
        engine.hold_before(3)
        session = cluster.session()
        await session.open("hello")
        await session.finish()
        await engine.held.wait()

        await asyncio.sleep(0.2)
        engine.resume()

        assert text_of(await session.answer()) == session_text("hello")


async def test_the_clients_deadline_ends_an_open_session(cluster: Cluster) -> None:
    session = cluster.session(timeout_s=0.2)
    await session.open("hello")

    error = await session.failure()

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(cluster.idle)
    assert cluster.outcomes == {State.EXPIRED: 1}


async def test_the_routers_deadline_ends_an_open_session() -> None:
    async with running_cluster(router__request_timeout_s=0.2) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        session = cluster.session()
        await session.open("hello")

        error = await session.failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        assert cluster.outcomes == {State.EXPIRED: 1}


# Prefill workers.


async def test_a_prefill_worker_that_is_lost_mid_session_is_replaced_with_the_prompt_as_it_stands(
    cluster_2x2: Cluster,
) -> None:
    session = cluster_2x2.session()
    await session.open("hello", "UPDATE")
    await session.update(1, " wide")
    await session.append(" world")
    await session.progressed(lambda progress: progress.ready_tokens >= 15)

    named(cluster_2x2, "prefill-0").engine.die("of a test")
    await until(lambda: bool(named(cluster_2x2, "prefill-1").engine.sessions))
    await session.append(", again")
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello wide world, again")
    completion = events[-1].completion
    assert completion.route.prefill_worker_id == "prefill-1"
    assert completion.session.tokens.inputs == 3
    assert completion.session.tokens.received_tokens == 23
    # Both workers' work counts.
    assert completion.session.tokens.computed_tokens == 15 + 23


async def test_a_prefill_worker_whose_process_ends_mid_session_is_replaced(cluster_2x2: Cluster) -> None:
    session = cluster_2x2.session()
    await session.open("hello")
    await session.append(" world")

    await named(cluster_2x2, "prefill-0").crash()
    await session.append("!")
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello world!")
    assert events[-1].completion.route.prefill_worker_id == "prefill-1"


async def test_a_prefill_worker_that_is_lost_after_finish_is_replaced(cluster_2x2: Cluster) -> None:
    engine = named(cluster_2x2, "prefill-0").engine
    engine.hold_before(0)
    session = cluster_2x2.session()
    await session.open("hello")
    await session.finish(" world")
    await engine.held.wait()

    engine.die("of a test")

    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert events[-1].completion.route.prefill_worker_id == "prefill-1"


async def test_a_session_accepted_at_once_by_the_second_worker_names_that_one(cluster_2x2: Cluster) -> None:
    await named(cluster_2x2, "prefill-0").crash()
    session = cluster_2x2.session()

    accepted = await session.open("hello")

    assert accepted.prefill_worker_id == "prefill-1"
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello")


async def test_when_no_prefill_worker_is_left_input_is_still_taken_and_the_decode_worker_computes_it(
    cluster: Cluster,
) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" wide")
    await session.progressed(lambda progress: progress.inputs == 1)

    named(cluster, "prefill-0").engine.die("of a test")
    await until(lambda: not cluster.router.membership.usable(PREFILL))
    await session.append(" world")
    progress = await session.progressed(lambda progress: progress.inputs == 2)
    assert (progress.prompt_tokens, progress.ready_tokens) == (16, 0)
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello wide world")
    completion = events[-1].completion
    assert (completion.route.prefill_worker_id, completion.route.decode_worker_id) == ("", "decode-0")
    assert not completion.HasField("session")


async def test_only_so_many_prefill_workers_are_tried() -> None:
    async with running_cluster(router__prefill_attempts=2) as cluster:
        for _ in range(3):
            await (await cluster.add(PREFILL)).crash()
        await cluster.add(DECODE)
        session = cluster.session()

        assert (await session.open("hello")).prefill_worker_id == ""

        await session.finish()
        assert text_of(await session.answer()) == session_text("hello")
        assert len(cluster.router.membership.usable(PREFILL)) == 1


async def test_without_a_prefill_worker_a_session_is_accepted_and_computed_at_its_finish(empty: Cluster) -> None:
    await empty.add(DECODE)
    session = empty.session()

    accepted = await session.open("hello", "UPDATE")

    assert accepted.prefill_worker_id == ""
    await session.append(" world")
    progress = await session.progressed(lambda progress: progress.inputs == 1)
    assert (progress.received_tokens, progress.prompt_tokens, progress.computed_tokens) == (11, 11, 0)
    await session.update(1, " wide world")
    await session.finish()
    events = await session.answer()
    assert text_of(events) == session_text("hello wide world")
    assert events[0].first_token.ttft_from_finish_ms > 0


async def test_a_worker_of_another_generation_refuses_and_the_next_one_serves(cluster_2x2: Cluster) -> None:
    stale = wire.WorkerRegistration()
    stale.CopyFrom(named(cluster_2x2, "prefill-0").record)
    stale.generation = 99
    await cluster_2x2.register(stale)
    session = cluster_2x2.session()

    assert (await session.open("hello")).prefill_worker_id == "prefill-1"

    await session.finish()
    assert text_of(await session.answer()) == session_text("hello")
    assert named(cluster_2x2, "prefill-0").engine.sessions == []


async def test_a_worker_that_drains_ends_the_sessions_it_has_and_gets_no_new_ones(cluster_2x2: Cluster) -> None:
    session = cluster_2x2.session()
    assert (await session.open("hello")).prefill_worker_id == "prefill-0"
    record = named(cluster_2x2, "prefill-0").record
    record.state = wire.WORKER_STATE_DRAINING
    await cluster_2x2.register(record)
    await until(lambda: len(cluster_2x2.router.membership.usable(PREFILL)) == 1)

    second = cluster_2x2.session()
    assert (await second.open("hello")).prefill_worker_id == "prefill-1"

    for each, name in ((session, "prefill-0"), (second, "prefill-1")):
        await each.append(" world")
        await each.finish()
        events = await each.answer()
        assert text_of(events) == session_text("hello world")
        assert events[-1].completion.route.prefill_worker_id == name


async def test_a_worker_that_drains_before_the_registry_says_so_is_passed_over(cluster_2x2: Cluster) -> None:
    named(cluster_2x2, "prefill-0").record.state = wire.WORKER_STATE_DRAINING
    await until(lambda: len(cluster_2x2.router.membership.usable(PREFILL)) >= 1)
    session = cluster_2x2.session()

    assert (await session.open("hello")).prefill_worker_id == "prefill-1"

    await session.finish()
    assert text_of(await session.answer()) == session_text("hello")


async def test_a_session_that_waits_for_input_moves_to_another_worker_when_its_own_is_told_to_give_it_back(
    cluster_2x2: Cluster,
) -> None:
    session = cluster_2x2.session()
    assert (await session.open("hello")).prefill_worker_id == "prefill-0"
    await session.append(" world")
    await session.progressed(lambda progress: progress.ready_tokens == 10)

    await drain(cluster_2x2, "prefill-0", move_sessions_after_ms=1)
    await until(lambda: bool(named(cluster_2x2, "prefill-1").engine.sessions))
    await session.append("!")
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello world!")
    assert events[-1].completion.route.prefill_worker_id == "prefill-1"


async def test_sessions_move_more_often_than_workers_may_be_lost(empty: Cluster) -> None:
    for _ in range(5):
        await empty.add(PREFILL)
    await empty.add(DECODE)
    session = empty.session()
    await session.open("hello")
    for index in range(4):
        await drain(empty, f"prefill-{index}", move_sessions_after_ms=0)
        await until(functools.partial(_has_a_session, empty, f"prefill-{index + 1}"))
    await session.append(" world")
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert events[-1].completion.route.prefill_worker_id == "prefill-4"


async def test_a_session_whose_finish_was_taken_does_not_move(cluster_2x2: Cluster) -> None:
    worker = named(cluster_2x2, "prefill-0")
    session = cluster_2x2.session()
    await session.open("hello")
    worker.engine.hold_before(0)
    await session.finish()
    await worker.engine.held.wait()

    await drain(cluster_2x2, "prefill-0", move_sessions_after_ms=0)
    await until(lambda: len(cluster_2x2.router.membership.usable(PREFILL)) == 1)
    worker.engine.resume()

    events = await session.answer()
    assert text_of(events) == session_text("hello")
    assert events[-1].completion.route.prefill_worker_id == "prefill-0"


def _has_a_session(cluster: Cluster, worker_id: str) -> bool:
    return bool(named(cluster, worker_id).engine.sessions)


async def drain(cluster: Cluster, worker_id: str, **options: int) -> None:
    """The worker is told, and the registry says so."""
    worker = named(cluster, worker_id)
    async with grpc.aio.insecure_channel(worker.record.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.SetDraining(wire.SetDrainingRequest(draining=True, **options))
    await cluster.register(worker.record)


# Decode workers.


async def test_a_session_is_prefilled_even_while_no_decode_worker_is_there(empty: Cluster) -> None:
    engine = (await empty.add(PREFILL)).engine
    session = empty.session()
    assert (await session.open("hello")).prefill_worker_id == "prefill-0"
    await session.append(" world")
    await session.progressed(lambda progress: progress.ready_tokens == 10)

    await empty.add(DECODE)
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert events[-1].completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED
    assert len(engine.sessions) == 1


async def test_without_a_decode_worker_a_finished_session_ends_after_the_bounded_wait() -> None:
    async with running_cluster(router__queue_timeout_s=0.05) as cluster:
        await cluster.add(PREFILL)
        session = cluster.session()
        await session.open("hello")
        await session.finish()
        await session.event("first_token")

        error = await session.failure()

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_ms(error) > 0
        await until(cluster.idle)
        assert cluster.outcomes == {State.FAILED: 1}


async def test_a_decode_worker_lost_before_it_began_is_replaced_by_one_that_computes_the_prompt(
    cluster_2x2: Cluster,
) -> None:
    session = cluster_2x2.session()
    await session.open("hello")
    await session.append(" world")
    await named(cluster_2x2, "decode-0").crash()
    await session.finish()

    events = await session.answer()

    assert text_of(events) == session_text("hello world")
    route = events[-1].completion.route
    assert (route.decode_worker_id, route.handoff) == ("decode-1", generation.HANDOFF_OUTCOME_RECOMPUTED)


async def test_a_decode_worker_lost_after_it_began_ends_the_session_with_a_hint(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    session = cluster.session()
    await session.open("hello")
    await session.finish()
    await decoder.held.wait()

    decoder.die("of a test")

    error = await session.failure()
    assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)
    await until(cluster.idle)
    assert cluster.outcomes == {State.FAILED: 1}


# The router.


async def test_a_defect_ends_the_session_as_internal_and_frees_the_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append("defect")

    error = await session.failure()

    assert error.code() is grpc.StatusCode.INTERNAL
    await until(cluster.idle)
    assert cluster.outcomes == {State.FAILED: 1}


async def test_a_cancel_while_the_session_waits_for_its_slot_leaves_the_queue() -> None:
    async with running_cluster(router__max_in_flight_requests=1) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        first = cluster.session()
        await first.open("hello")
        queued = cluster.session()
        await queued.send(open=session_open("hello", "APPEND"))
        await until(lambda: cluster.parts.admission.queued == 1)

        queued.call.cancel()

        await until(lambda: cluster.outcomes == {State.CANCELLED: 1})
        await first.finish()
        assert text_of(await first.answer()) == session_text("hello")
