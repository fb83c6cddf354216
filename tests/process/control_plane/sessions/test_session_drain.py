"""Sessions on a prefill worker that drains: they end there, or are moved to another one.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import functools

import grpc
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from tests.fakes.answers import session_text, text_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, until


async def drain(cluster: Cluster, worker_id: str, **options: int) -> None:
    """The worker is told, and the registry says so."""
    worker = named(cluster, worker_id)
    async with grpc.aio.insecure_channel(worker.record.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.SetDraining(wire.SetDrainingRequest(draining=True, **options))
    await cluster.register(worker.record)


def _has_a_session(cluster: Cluster, worker_id: str) -> bool:
    return bool(named(cluster, worker_id).engine.sessions)


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
