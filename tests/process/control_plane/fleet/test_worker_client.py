"""The router's calls to a worker: what is closed early is cancelled there, what does not answer counts as lost.

All of it as plain text, and encrypted as it is with a secret: gRPC is to tell the same of both.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core.errors import DeadlineError, InvalidInputError, NotSupportedError
from cluster_core.ids import WorkerId
from cluster_wire.members import MembersOnly, member_metadata
from cluster_wire.secret import Secret
from cluster_wire.worker_tls import add_worker_port, worker_channel
from control_plane.fleet.worker_client import (
    WorkerClient,
    WorkerDiedError,
    WorkerLostError,
    WorkerUnreachableError,
    _translated,
)
from control_plane.model.worker_snapshot import WorkerSnapshot
from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService
from tests.fakes.cluster import CLIENT_DEADLINE_S, until
from tests.fakes.engine import FakeEngine
from tests.fakes.wiretap import tapped


class Called:
    """A client and the one decode worker that it calls."""

    def __init__(self, address: str, engine: FakeEngine, server: grpc.aio.Server, secret: Secret | None) -> None:
        self.client = WorkerClient(1 << 20, worker_channel(secret), member_metadata(secret))
        self.engine = engine
        self.server = server
        self.worker = WorkerSnapshot(WorkerId("decode-0"), 1, wire.POOL_DECODE, address)

    def reached_at(self, address: str) -> None:
        self.worker = replace(self.worker, address=address)

    def decode(self, name: str = "r#1", timeout_s: float = 60.0) -> AsyncIterator[wire.DecodeResponse]:
        request = wire.DecodeRequest(
            request_id=name, generation=1, token_ids=[1, 2], sampling=generation.SamplingParams(max_tokens=1000)
        )
        return self.client.decode(self.worker, request, timeout_s).messages()


@pytest.fixture(params=[None, Secret(b"a" * 32)], ids=["plain", "encrypted"])
def secret(request: pytest.FixtureRequest) -> Secret | None:
    found: Secret | None = request.param
    return found


@pytest.fixture
async def called(secret: Secret | None) -> AsyncIterator[Called]:
    async with calling(DecodeService, secret) as called:
        yield called


@pytest.fixture
async def prefiller(secret: Secret | None) -> AsyncIterator[Called]:
    async with calling(PrefillService, secret) as called:
        yield called


@asynccontextmanager
async def calling(service: type[DecodeService | PrefillService], secret: Secret | None) -> AsyncIterator[Called]:
    engine = FakeEngine()
    server = grpc.aio.server(interceptors=[MembersOnly(secret)] if secret is not None else [])
    record = wire.WorkerRegistration(worker_id="decode-0", generation=1, state=wire.WORKER_STATE_READY)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service(engine, record, lambda: None), server)
    called = Called(f"127.0.0.1:{add_worker_port(server, '127.0.0.1:0', secret)}", engine, server, secret)
    await server.start()
    yield called
    await called.client.close()
    await server.stop(None)


async def test_a_decode_whose_iterator_is_closed_is_cancelled_at_the_worker(called: Called) -> None:
    called.engine.hold_before(3)
    stream = called.decode()
    assert (await anext(stream)).HasField("started")
    await called.engine.held.wait()
    assert called.engine.status().load.running_requests == 1

    await stream.aclose()  # type: ignore[attr-defined]

    await until(lambda: called.engine.status().load.running_requests == 0)


async def test_a_worker_that_is_gone_counts_as_lost_under_its_name(called: Called) -> None:
    await called.server.stop(None)

    with pytest.raises(WorkerLostError, match=r"^worker decode-0: "):
        await anext(called.decode())


async def test_a_worker_of_another_pool_does_not_serve_the_call(called: Called) -> None:
    with pytest.raises(Exception, match="worker decode-0") as caught:
        await called.client.prefill(called.worker, wire.PrefillRequest(generation=1), 5.0)

    assert not isinstance(caught.value, WorkerLostError)


async def test_a_call_beyond_its_time_is_a_deadline_not_a_lost_worker(called: Called) -> None:
    called.engine.hold_before(0)

    with pytest.raises(DeadlineError):
        await anext(called.decode(timeout_s=CLIENT_DEADLINE_S))

    await until(lambda: called.engine.status().load.running_requests == 0)


async def test_what_the_engine_refuses_stays_bad_input(called: Called) -> None:
    called.engine.hold_before(1)
    async with aclosing(called.decode("same")) as first:  # type: ignore[type-var]
        await anext(first)

        with pytest.raises(InvalidInputError, match="request_id: is already running"):
            await anext(called.decode("same"))


async def test_a_channel_to_a_worker_that_left_is_closed_only_after_its_calls(called: Called) -> None:
    called.engine.hold_before(3)
    async with aclosing(called.decode()) as stream:  # type: ignore[type-var]
        await anext(stream)

        called.client.keep_only(set())
        called.engine.resume()

        messages = [message async for message in stream]
    assert messages[-1].end.completion_tokens == 1000


# Processes that die.


@pytest.mark.parametrize("resets", [False, True], ids=["an end", "a reset"])
async def test_a_worker_that_dies_under_calls_has_died_and_is_not_reached_after(
    called: Called, *, resets: bool
) -> None:
    called.engine.hold_before(3)
    async with tapped(called.worker.address) as (tap, address):
        called.reached_at(address)
        running = [asyncio.create_task(_last(called.decode(name))) for name in ("r#1", "r#2")]
        await called.engine.held.wait()

        await tap.break_off(resets=resets)

        assert [type(await each) for each in running] == [WorkerDiedError] * 2
        await not_reached(lambda: anext(aiter(called.decode("r#5"))))


@pytest.mark.parametrize("resets", [False, True], ids=["an end", "a reset"])
async def test_a_worker_that_dies_under_a_prefill_and_a_session_has_died(prefiller: Called, *, resets: bool) -> None:
    prefiller.engine.hold_before(0)
    request = wire.PrefillRequest(
        request_id="r#2", generation=1, token_ids=[1, 2], sampling=generation.SamplingParams(max_tokens=1)
    )
    async with tapped(prefiller.worker.address) as (tap, address):
        prefiller.reached_at(address)
        async with prefiller.client.prefill_session(prefiller.worker, 60.0) as session:
            await session.write(opening())
            assert (await session.read()).progress.prompt_tokens == 2
            running = asyncio.create_task(prefiller.client.prefill(prefiller.worker, request, 60.0))
            await prefiller.engine.held.wait()

            await tap.break_off(resets=resets)

            with pytest.raises(WorkerDiedError):
                await running
            with pytest.raises(WorkerDiedError):
                while True:
                    await session.read()
        await not_reached(lambda: prefiller.client.prefill(prefiller.worker, request, 60.0))


async def not_reached(call: Callable[[], Awaitable[Any]]) -> None:
    """A call on the connection that has just broken may go down with it."""
    for _ in range(100):
        with pytest.raises(WorkerLostError) as raised:
            await call()
        if raised.type is WorkerUnreachableError:
            return
        assert raised.type is WorkerDiedError
    raise AssertionError("the worker is gone, and was not said to be")


async def _last(stream: AsyncIterator[wire.DecodeResponse]) -> Exception | None:
    """What it ends with."""
    try:
        async for _ in stream:
            pass
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        return error
    return None


# Sessions.


def opening(number: int = 1) -> wire.PrefillSessionRequest:
    opened = wire.PrefillSessionOpen(
        request_id="r#1", generation=number, mode=generation.SESSION_MODE_APPEND, token_ids=[1, 2]
    )
    return wire.PrefillSessionRequest(open=opened)


async def test_a_session_whose_block_is_left_is_cancelled_at_the_worker(prefiller: Called) -> None:
    async with prefiller.client.prefill_session(prefiller.worker, 5.0) as session:
        await session.write(opening())
        assert (await session.read()).progress.prompt_tokens == 2
        assert prefiller.engine.status().load.running_requests == 1

    await until(lambda: prefiller.engine.status().load.running_requests == 0)


async def test_a_session_at_a_worker_that_is_gone_counts_as_lost(prefiller: Called) -> None:
    await prefiller.server.stop(None)
    async with prefiller.client.prefill_session(prefiller.worker, 5.0) as session:
        with pytest.raises(WorkerLostError, match=r"^worker decode-0: "):
            await session.read()


async def test_what_is_written_to_a_session_that_has_ended_is_dropped_and_reading_says_why(prefiller: Called) -> None:
    async with prefiller.client.prefill_session(prefiller.worker, 5.0) as session:
        await session.write(opening(number=7))
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="the call is for generation 7"):
                await session.read()
        await session.write(opening())


async def test_a_session_beyond_its_time_is_a_deadline_not_a_lost_worker(prefiller: Called) -> None:
    async with prefiller.client.prefill_session(prefiller.worker, 0.1) as session:
        with pytest.raises(DeadlineError):
            await session.write(opening())
            while True:
                await session.read()


async def test_a_decode_worker_has_no_sessions_and_does_not_count_as_lost(called: Called) -> None:
    async with called.client.prefill_session(called.worker, 5.0) as session:
        with pytest.raises(NotSupportedError, match="is no prefill worker"):
            await session.read()


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("failed to connect to all addresses; last error: Connection refused", WorkerUnreachableError),
        ("recvmsg:No route to host", WorkerDiedError),
        ("Stream removed (recvmsg:Connection reset by peer (104))", WorkerDiedError),
        ("Socket closed", WorkerDiedError),
        ("GOAWAY received", WorkerLostError),
    ],
)
def test_only_who_could_not_be_connected_to_was_not_reached(details: str, kind: type[WorkerLostError]) -> None:
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details, None)
    worker = WorkerSnapshot(WorkerId("decode-0"), 1, wire.POOL_DECODE, "127.0.0.1:1")
    with pytest.raises(WorkerLostError) as caught, _translated(worker):
        raise error
    assert type(caught.value) is kind
