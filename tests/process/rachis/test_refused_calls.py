"""Answers whose call ends before they are whole: refused for a while, by who goes on with them too, or cut short.

The routers are made up: what each call says, and whether it goes, is in the test.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from rachis import AsyncClient, FailedError, OverloadedError, conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from cluster_core import errors
from cluster_wire import calls

_BOUND_S = 120.0
# More than a client's budget has for a bad moment.
_ANSWERS = 30
DONE = generation.Completion(finish_reason=generation.FINISH_REASON_STOP)
# What is done of a call, from what has been received of its answer.
Play = Callable[[calls.Context, list[int]], Awaitable[None]]


class MadeUpRouter(router_pb2_grpc.RouterServiceServicer):
    """asked: of each call, what had been received of its answer."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.asked: list[list[int]] = []

    async def Generate(  # type: ignore[override]  # noqa: N802 - gRPC's name; it writes through the context
        self, request: api.GenerateRequest, context: calls.Context
    ) -> None:
        await self._begun([], context)

    async def Resume(  # type: ignore[override]  # noqa: N802 - as above
        self, request: api.ResumeRequest, context: calls.Context
    ) -> None:
        await self._begun(list(request.received[0].token_ids), context)

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802 - as above
        self, request_iterator: Any, context: calls.Context
    ) -> None:
        opened = (await conventions.next_message(context)).open
        await self._begun(list(opened.received.token_ids), context)

    async def _begun(self, received: list[int], context: calls.Context) -> None:
        self.asked.append(received)
        await self._play(context, received)


@asynccontextmanager
async def router(play: Play, **options: Any) -> AsyncIterator[tuple[AsyncClient, MadeUpRouter]]:
    made_up, server = MadeUpRouter(play), grpc.aio.server()  # type: ignore[abstract]  # it answers, and no more
    router_pb2_grpc.add_RouterServiceServicer_to_server(made_up, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with AsyncClient(address, **options) as client, asyncio.timeout(_BOUND_S):
            yield client, made_up
    finally:
        await server.stop(None)


def delta(token: int) -> generation.CompletionDelta:
    return generation.CompletionDelta(token_ids=[token], text=str(token))


async def goes(context: calls.Context) -> None:
    """As a router that is gone: it says nothing of its own."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def is_full(context: calls.Context) -> None:
    await calls.abort(context, errors.OverloadedError("full", retry_after_ms=20))


class FullOnceBegun:
    """Gives one token and goes; whoever goes on is refused so often for each answer; then comes the second token."""

    def __init__(self, answers: int, times: int) -> None:
        self._left = answers * times

    async def __call__(self, context: calls.Context, received: list[int]) -> None:
        if not received:
            await calls.write(context, api.GenerateResponse(delta=delta(1)))
            await goes(context)
        if self._left:
            self._left -= 1
            await is_full(context)
        await calls.write(context, api.GenerateResponse(delta=delta(2)))
        await calls.write(context, api.GenerateResponse(completion=DONE))


async def test_answers_that_have_begun_wait_where_the_next_router_is_full() -> None:
    async with router(FullOnceBegun(_ANSWERS, 1), max_retries=_ANSWERS) as (client, made_up):
        answers = await asyncio.gather(*(client.generate("x") for _ in range(_ANSWERS)))
    assert [answer.token_ids for answer in answers] == [[1, 2]] * _ANSWERS
    assert (client.resumes, client.retries) == (_ANSWERS, _ANSWERS)
    assert sorted(made_up.asked) == [[]] * _ANSWERS + [[1]] * 2 * _ANSWERS


@pytest.mark.parametrize("most", [0, 2])
async def test_an_answer_that_has_begun_waits_no_more_often_than_was_said(most: int) -> None:
    async with router(FullOnceBegun(1, 5), max_retries=most) as (client, made_up):
        with pytest.raises(OverloadedError, match="full") as refused:
            await client.generate("x")
    assert refused.value.retry_after_ms == 20
    assert (client.retries, len(made_up.asked)) == (most, 2 + most)


async def test_an_answer_that_is_refused_in_its_midst_is_not_asked_for_again() -> None:
    async def play(context: calls.Context, received: list[int]) -> None:
        await calls.write(context, api.GenerateResponse(delta=delta(1)))
        await is_full(context)

    async with router(play, max_retries=2) as (client, made_up):
        with pytest.raises(OverloadedError):
            await client.generate("x")
    assert made_up.asked == [[]]


async def test_an_answer_that_ends_without_its_completion_has_failed() -> None:
    async def play(context: calls.Context, received: list[int]) -> None:
        await calls.write(context, api.GenerateResponse(delta=delta(1)))
        await calls.write(context, api.GenerateResponse(completion=DONE))

    async with router(play) as (client, _):
        assert (await client.generate("x")).token_ids == [1]
        with pytest.raises(FailedError, match="after 1 of 2 completions"):
            await client.generate_choices("x", 2)


async def session_text(client: AsyncClient) -> str:
    async with client.session("x") as session:
        await session.append("y")
        return "".join([each.text async for each in session.finish()])


async def read_to_finish(context: calls.Context) -> int:
    """How many messages came after `open`."""
    await calls.write(context, api.StreamGenerateResponse(accepted=api.SessionAccepted()))
    count = 1
    while not (await conventions.next_message(context)).HasField("finish"):
        count += 1
    return count


async def test_a_session_waits_as_a_request_does() -> None:
    """Where it is opened, and where it goes on; it is told whole each time."""
    refused, told = [0, 0], list[int]()

    async def play(context: calls.Context, received: list[int]) -> None:
        refused[len(received)] += 1
        if refused[len(received)] == 1:
            await is_full(context)
        told.append(await read_to_finish(context))
        if not received:
            first = api.SessionFirstToken(delta=delta(1))
            await calls.write(context, api.StreamGenerateResponse(first_token=first))
            await goes(context)
        await calls.write(context, api.StreamGenerateResponse(delta=delta(2)))
        await calls.write(context, api.StreamGenerateResponse(completion=DONE))

    async with router(play, max_retries=2) as (client, made_up):
        assert await session_text(client) == "12"
    assert (client.resumes, client.retries) == (1, 2)
    assert (made_up.asked, told) == ([[], [], [1], [1]], [2, 2])


async def test_a_session_does_not_wait_unless_it_is_told_to() -> None:
    async def play(context: calls.Context, received: list[int]) -> None:
        await is_full(context)

    async with router(play) as (client, made_up):
        with pytest.raises(OverloadedError, match="full"):
            await session_text(client)
    assert made_up.asked == [[]]
