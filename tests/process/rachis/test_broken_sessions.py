"""A client's session whose call ends under its hands: refused while it writes, closed with its client, cancelled.

The router is made up: it answers as each test says.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from rachis import AsyncClient, Received, conventions
from rachis.errors import FailedError, InvalidInputError, OutOfOrderError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from cluster_core.errors import OverloadedError
from cluster_wire import calls
from tests.fakes.answers import retry_after_ms
from tests.fakes.cluster import until

_BOUND_S = 120.0
Answer = Callable[[calls.Context], Awaitable[None]]


class MadeUpRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.calls = 0

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802 - gRPC's name; it writes through the context
        self, request_iterator: Any, context: calls.Context
    ) -> None:
        self.calls += 1
        await conventions.next_message(context)
        await calls.write(context, api.StreamGenerateResponse(accepted=api.SessionAccepted()))
        await self._answer(context)


@asynccontextmanager
async def two_routers(answer: Answer) -> AsyncIterator[tuple[AsyncClient, list[MadeUpRouter]]]:
    routers = [MadeUpRouter(answer), MadeUpRouter(answer)]  # type: ignore[abstract]  # it has sessions only
    servers, addresses = [], []
    for router in routers:
        server = grpc.aio.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        async with AsyncClient(",".join(addresses)) as client:
            yield client, routers
    finally:
        await asyncio.gather(*(server.stop(None) for server in servers))


async def never_reads(context: calls.Context) -> None:
    await asyncio.Event().wait()


async def completes(context: calls.Context) -> None:
    await calls.write(context, api.StreamGenerateResponse(completion=generation.Completion()))


async def refuses(context: calls.Context) -> None:
    for _ in range(5):
        await conventions.next_message(context)
    await calls.abort(context, OverloadedError("full", retry_after_ms=700))


async def fill(session: Any) -> None:
    while True:
        await session.append("x" * 1000)


async def tells_and_refuses(context: calls.Context) -> None:
    for number in range(60):
        progress = generation.SessionProgress(received_tokens=number)
        await calls.write(context, api.StreamGenerateResponse(progress=progress))
    await refuses(context)


@pytest.mark.parametrize("answer", [refuses, tells_and_refuses])
async def test_a_refusal_under_a_write_is_told_and_nobody_else_is_asked(answer: Answer) -> None:
    async with two_routers(answer) as (client, routers), asyncio.timeout(_BOUND_S):
        for _ in range(40):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with client.session("hello") as session:
                    await fill(session)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, caught.value.details()
            assert retry_after_ms(caught.value) == 700
        assert sum(router.calls for router in routers) == 40


async def test_a_session_ends_when_its_client_is_closed() -> None:
    async with two_routers(never_reads) as (client, _), asyncio.timeout(_BOUND_S):
        session = client.session("hello")
        await session.__aenter__()
        appending = asyncio.create_task(fill(session))
        await asyncio.sleep(0.2)

        await client.__aexit__(None, None, None)

        await asyncio.wait({appending})
        assert appending.cancelled() or isinstance(appending.exception(), OutOfOrderError)
        with pytest.raises(OutOfOrderError, match="has ended"):
            await anext(session.deltas())
        await session.__aexit__(None, None, None)


async def test_an_append_that_is_cancelled_while_it_is_sent_ends_the_session() -> None:
    async with two_routers(never_reads) as (client, routers), asyncio.timeout(_BOUND_S):
        async with client.session("hello") as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await fill(session)

            with pytest.raises(grpc.aio.AioRpcError):
                await session.append("again")
        assert sum(router.calls for router in routers) == 1


async def test_what_a_router_said_before_it_ended_the_call_is_read_to_its_end() -> None:
    """Writes fail before it is read."""

    async def answers(context: calls.Context) -> None:
        for number in range(150):
            delta = generation.CompletionDelta(token_ids=[number])
            event = {"delta": delta} if number else {"first_token": api.SessionFirstToken(delta=delta)}
            await calls.write(context, api.StreamGenerateResponse(**event))
        await completes(context)

    async with two_routers(answers) as (client, routers), asyncio.timeout(_BOUND_S):
        async with client.session("hello") as session:
            filling = asyncio.create_task(fill(session))
            tokens: list[int] = []
            async for delta in session.deltas():
                tokens += delta.token_ids
                await asyncio.sleep(0.002)
            await asyncio.wait({filling})
            assert isinstance(filling.exception(), OutOfOrderError)
            assert [delta async for delta in session.deltas()] == [], "it ends whenever it is asked"
        assert tokens == list(range(150))
        assert sum(router.calls for router in routers) == 1


async def test_a_session_that_ended_well_says_so_to_who_appends() -> None:
    async def ends(context: calls.Context) -> None:
        for _ in range(5):
            await conventions.next_message(context)
        await completes(context)

    async with two_routers(ends) as (client, _), asyncio.timeout(_BOUND_S):
        for _ in range(20):
            with pytest.raises(OutOfOrderError, match="has ended"):
                async with client.session("hello") as session:
                    await fill(session)


async def test_a_session_that_ends_without_a_completion_has_failed() -> None:
    async def ends(context: calls.Context) -> None:
        delta = generation.CompletionDelta(token_ids=[7])
        await calls.write(context, api.StreamGenerateResponse(delta=delta))

    async with two_routers(ends) as (client, routers), asyncio.timeout(_BOUND_S), client.session("hello") as session:
        with pytest.raises(FailedError, match="ended the session without a completion"):
            _ = [delta async for delta in session.deltas()]
        with pytest.raises(FailedError):
            await session.append("more")
    assert sum(router.calls for router in routers) == 1


async def test_who_stops_reading_finds_the_end_later() -> None:
    async def answers(context: calls.Context) -> None:
        for _ in range(100):
            await calls.write(context, api.StreamGenerateResponse(delta=generation.CompletionDelta(text="x")))

    async with two_routers(answers) as (client, _), asyncio.timeout(_BOUND_S):
        async with client.session("hello") as session:
            await asyncio.sleep(0.2)
        with pytest.raises(OutOfOrderError, match="has ended"):
            async for _ in session.deltas():
                pass


async def test_a_message_that_no_client_sends_is_refused_before_it_is_sent() -> None:
    async with two_routers(never_reads) as (client, _), client.session("hello") as session:
        with pytest.raises(InvalidInputError, match="a client sends 67108864 at most"):
            await session.append("x" * (65 << 20))
        await session.append("small")


async def test_who_appends_and_does_not_read_is_told_of_the_end_by_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end lies behind an answer that is longer than a client holds."""

    async def answers_for_ever(context: calls.Context) -> None:
        while True:
            await calls.write(context, api.StreamGenerateResponse(delta=generation.CompletionDelta(text="x")))

    # The client's package has no setting for tests; five seconds would show no more.
    monkeypatch.setattr("rachis.session._GRACE_S", 0.2)
    async with (
        two_routers(answers_for_ever) as (client, _),
        asyncio.timeout(_BOUND_S),
        client.session("hello", timeout_s=2.0) as session,
    ):
        with pytest.raises(OutOfOrderError, match="has ended"):
            await fill(session)


async def test_what_was_given_up_while_it_was_sent_is_told_to_nobody_when_its_router_goes() -> None:
    """The call is over already when the append is cancelled, so that cancelling it does nothing."""

    async def goes(context: calls.Context) -> None:
        await gone.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    gone = asyncio.Event()
    async with two_routers(goes) as (client, routers), asyncio.timeout(_BOUND_S):
        async with client.session("hello") as session:
            # The call is over already when it is cancelled: only a stand-in is so at the right moment.
            call, session._call = session._call, SimpleNamespace(cancel=lambda: None)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await fill(session)
            # The real call again: its router's end is still to come.
            session._call = call
            gone.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(session.deltas())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (session.routers_lost, sum(router.calls for router in routers)) == (0, 1)


async def test_what_is_given_up_while_another_router_is_waited_for_is_told_to_nobody() -> None:
    async def goes(context: calls.Context) -> None:
        await gone.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    gone = asyncio.Event()
    async with two_routers(goes) as (client, routers), asyncio.timeout(_BOUND_S):
        async with client.session("hello") as session:
            # No public event says that the session waits for another router.
            ask = session._goes_on

            async def meanwhile(*args: Any) -> bool:
                """As an append does that is cancelled while its message is being sent."""
                # The state that an append leaves which is cancelled while its message is sent.
                session._is_broken = True
                return await ask(*args)

            # The one that breaks the session, in its place.
            session._goes_on = meanwhile
            gone.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(session.deltas())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert sum(router.calls for router in routers) == 1


async def test_what_was_received_is_what_was_taken_not_what_has_come() -> None:
    async def answers(context: calls.Context) -> None:
        for token in range(3):
            delta = generation.CompletionDelta(token_ids=[token], text="x")
            await calls.write(context, api.StreamGenerateResponse(delta=delta))

    async with two_routers(answers) as (client, _), asyncio.timeout(_BOUND_S):
        received = Received()
        async with client.session("hello", received=received) as session:
            assert session.received is received
            async with aclosing(session.deltas()) as deltas:
                await anext(deltas)
            await until(lambda: session.ended)
        assert len(received) == 1
        # It is gone on with by itself as well.
        assert len(session._received) == 3


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2", "dns:///routers:7421"])
async def test_a_client_keeps_what_it_sent(address: str) -> None:
    """Of one router too: it may be started again, or be an address of several."""
    async with AsyncClient(address) as client:
        # Whether the client keeps what it sent is visible only after a router is lost.
        outbox = client.session("hello")._outbox
        outbox.add(api.StreamGenerateRequest(open=api.SessionOpen(model="m")))
        await outbox.next()
        assert outbox.keeps_all
