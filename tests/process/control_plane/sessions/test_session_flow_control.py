"""A client faster than the engine is stopped by the stream; what the router takes meanwhile has a measured bound.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from control_plane.model.lifecycle import State
from tests.fakes.answers import session_text, text_of
from tests.fakes.cluster import DECODE, PREFILL, SESSION_DEADLINE_S, Cluster, named, running_cluster, until
from tests.fakes.engine import FakeEngine
from tests.fakes.session_call import SessionCall

MAX_BACKLOG_TOKENS = 20
MAX_UNAPPLIED_INPUTS = 8


@pytest.fixture
async def small() -> AsyncIterator[Cluster]:
    """A cluster with small limits."""
    async with small_cluster() as cluster:
        yield cluster


def small_cluster(**flags: Any) -> Any:
    limits = {
        "streaming__max_backlog_tokens": MAX_BACKLOG_TOKENS,
        "streaming__max_unapplied_inputs": MAX_UNAPPLIED_INPUTS,
    }
    return running_cluster(**{**limits, **flags})


async def two_workers(cluster: Cluster) -> FakeEngine:
    """The prefill worker's engine."""
    await cluster.add(DECODE)
    return (await cluster.add(PREFILL)).engine


async def stops_at(engine: FakeEngine, tokens: int) -> None:
    """So many tokens of the session reach its worker, and then no more, however long everything runs that can."""
    await until(lambda: engine.sessions[0].received_tokens >= tokens)
    for _ in range(2000):
        await asyncio.sleep(0)
    assert engine.sessions[0].received_tokens == tokens


async def test_appends_are_read_only_up_to_the_backlog_limit(small: Cluster) -> None:
    engine = await two_workers(small)
    engine.compute_at_most(0)
    session = small.session()
    await session.open("hello")
    for _ in range(300):
        await session.append("x")
    await session.finish()

    # Reading stops with the first message that lifts the backlog over the limit.
    await stops_at(engine, MAX_BACKLOG_TOKENS + 1)
    engine.compute_at_most(100)
    await stops_at(engine, 100 + MAX_BACKLOG_TOKENS + 1)

    engine.resume()
    assert text_of(await session.answer()) == session_text("hello" + "x" * 300)


async def test_what_has_been_read_is_bounded_by_the_inputs_on_their_way(small: Cluster) -> None:
    engine = await two_workers(small)
    engine.hold_inputs()
    session = small.session()
    await session.open("hello", "UPDATE")
    for _ in range(100):
        await session.append("x")
    await session.finish()

    await stops_at(engine, 5 + MAX_UNAPPLIED_INPUTS)

    engine.resume()
    assert text_of(await session.answer()) == session_text("hello" + "x" * 100)


async def test_a_client_that_sends_faster_than_the_engine_takes_in_has_to_wait(small: Cluster) -> None:
    engine = await two_workers(small)
    engine.hold_inputs()
    session = small.session()
    await session.open("hello", "UPDATE")
    count, written = 3_000, 0

    async def write() -> None:
        nonlocal written
        for revision in range(count):
            await session.update(revision, f"{revision:05}" + "x" * 400)
            written += 1

    writing = asyncio.create_task(write())
    before = -1
    while before != written:
        before = written
        await asyncio.sleep(0.2)

    # The rest waits in the client: what has left it fits the window of the stream, and the buffers of both sides.
    assert written * 400 < 1 << 20
    # One of them is larger than all that may wait: it is the only one that does.
    await until(lambda: engine.sessions[0].waiting_inputs == 1)
    engine.resume()
    await writing
    await session.finish()
    assert text_of(await session.answer()) == session_text(f"hello{count - 1:05}" + "x" * 400)


async def test_small_updates_wait_up_to_their_number(small: Cluster) -> None:
    engine = await two_workers(small)
    engine.hold_inputs()
    session = small.session()
    await session.open("hello", "UPDATE")
    for revision in range(2 * MAX_UNAPPLIED_INPUTS):
        await session.update(revision, f"{revision % 10}")

    await until(lambda: engine.sessions[0].waiting_inputs == MAX_UNAPPLIED_INPUTS)
    engine.resume()
    await session.finish()
    assert text_of(await session.answer()) == session_text(f"hello{(2 * MAX_UNAPPLIED_INPUTS - 1) % 10}")


async def test_in_update_mode_a_backlog_does_not_stop_the_client(small: Cluster) -> None:
    engine = await two_workers(small)
    engine.compute_at_most(0)
    session = small.session()
    await session.open("hello", "UPDATE")
    await session.update(1, "x" * 400)
    await session.update(2, " world")

    await session.progressed(lambda progress: progress.inputs == 2)

    engine.resume()
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello world")


# While the client is stopped.


async def stopped(cluster: Cluster, engine: FakeEngine, timeout_s: float | None = None) -> SessionCall:
    engine.compute_at_most(0)
    session = cluster.session(timeout_s=timeout_s)
    await session.open("hello")
    await session.append("x" * (MAX_BACKLOG_TOKENS + 1))
    await session.append("y")
    await stops_at(engine, 5 + MAX_BACKLOG_TOKENS + 1)
    return session


async def test_a_cancelled_call_ends_a_session_whose_client_is_stopped(small: Cluster) -> None:
    session = await stopped(small, await two_workers(small))

    session.call.cancel()

    await until(small.idle)
    assert small.outcomes == {State.CANCELLED: 1}


async def test_the_deadline_ends_a_session_whose_client_is_stopped(small: Cluster) -> None:
    session = await stopped(small, await two_workers(small), timeout_s=SESSION_DEADLINE_S)

    error = await session.failure()

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(small.idle)
    assert small.outcomes == {State.EXPIRED: 1}


async def test_the_routers_deadline_ends_a_session_whose_client_is_stopped() -> None:
    async with small_cluster(router__request_timeout_s=SESSION_DEADLINE_S) as cluster:
        session = await stopped(cluster, await two_workers(cluster))

        error = await session.failure()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        await cluster.ends_with({State.EXPIRED: 1})


async def test_a_client_that_is_stopped_is_not_idle() -> None:
    async with small_cluster(streaming__idle_timeout_s=3.0) as cluster:
        engine = await two_workers(cluster)
        session = await stopped(cluster, engine)

        await asyncio.sleep(3.5)
        engine.resume()
        await session.finish()

        assert text_of(await session.answer()) == session_text("hello" + "x" * (MAX_BACKLOG_TOKENS + 1) + "y")


async def test_a_cancel_message_is_read_once_the_engine_has_caught_up(small: Cluster) -> None:
    engine = await two_workers(small)
    session = await stopped(small, engine)
    await session.send(cancel={})

    engine.resume()

    assert (await session.failure()).code() is grpc.StatusCode.CANCELLED


async def test_a_worker_that_is_lost_while_the_client_is_stopped_does_not_stop_it_for_ever(small: Cluster) -> None:
    engine = await two_workers(small)
    session = await stopped(small, engine)
    await session.finish()

    engine.die("of a test")

    assert text_of(await session.answer()) == session_text("hello" + "x" * (MAX_BACKLOG_TOKENS + 1) + "y")
    assert named(small, "decode-0").engine.jobs != []
