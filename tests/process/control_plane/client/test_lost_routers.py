"""A client of two routers, each with workers of its own here, over connections that are cut."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation

from cluster_core.errors import InvalidInputError
from control_plane.client import ClientSession, RachisClient, RefusedError, text_prompt
from tests.fakes.answers import session_text, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
_HOST = "127.0.0.1"


class Door:
    """In front of a router, on a port of its own; once it is cut, nothing comes and nothing goes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.address = ""
        self._server: asyncio.Server
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.address = f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(*self.cluster.router.address.rsplit(":", 1))
        self._writers += (writer, behind[1])
        await asyncio.gather(_copy(reader, behind[1]), _copy(behind[0], writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()


@pytest.fixture
async def doors() -> AsyncIterator[list[Door]]:
    async with running_cluster(handoff__deadline_s=0.5) as first, running_cluster(handoff__deadline_s=0.5) as second:
        found = [Door(first), Door(second)]
        for door in found:
            await door.open()
            for pool in (PREFILL, DECODE):
                await door.cluster.add(pool)
        try:
            yield found
        finally:
            for door in found:
                await door.cut()


@pytest.fixture
async def client(doors: list[Door]) -> AsyncIterator[RachisClient]:
    async with RachisClient(",".join(door.address for door in doors)) as client:
        yield client


def engines(door: Door) -> list[Any]:
    return [named(door.cluster, name).engine for name in ("prefill-0", "decode-0")]


def hold(doors: list[Door], steps: int = 0) -> None:
    for door in doors:
        for engine in engines(door):
            engine.hold_before(steps)


def running(door: Door) -> bool:
    return any(engine.status().load.running_requests for engine in engines(door))


async def the_one_that_runs(doors: list[Door]) -> tuple[Door, Door]:
    """And the other one."""
    await until(lambda: any(running(door) for door in doors))
    return (doors[0], doors[1]) if running(doors[0]) else (doors[1], doors[0])


def expect_calls(*doors: Door) -> None:
    """The clusters compare the calls they have seen with those that the test says there were."""
    for door in doors:
        door.cluster.calls += 1


def release(door: Door) -> None:
    for engine in engines(door):
        engine.resume()


async def test_a_request_whose_router_is_gone_before_it_answered_is_answered_by_another(
    doors: list[Door], client: RachisClient
) -> None:
    hold(doors)
    request = asyncio.create_task(client.generate(text_prompt("hello"), **GREEDY))
    lost, other = await the_one_that_runs(doors)

    await lost.cut()
    release(other)

    assert (await request).text == whole_text()
    expect_calls(lost, other)


async def test_requests_go_to_the_routers_that_are_there(doors: list[Door], client: RachisClient) -> None:
    await doors[0].cut()

    for _ in range(4):
        assert (await client.generate(text_prompt("hello"), **GREEDY)).text == whole_text()
        expect_calls(doors[1])


async def test_a_request_that_kills_routers_is_not_given_to_a_third(doors: list[Door], client: RachisClient) -> None:
    hold(doors)
    request = asyncio.create_task(client.generate(text_prompt("hello"), **GREEDY))
    lost, other = await the_one_that_runs(doors)
    await lost.cut()
    await until(lambda: running(other))

    await other.cut()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await request
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    expect_calls(lost, other)


async def test_what_a_router_answered_is_not_asked_again() -> None:
    hasty: dict[str, Any] = {"router__queue_timeout_s": 0.05}
    async with running_cluster(**hasty) as first, running_cluster(**hasty) as second:
        async with RachisClient(f"{first.router.address},{second.router.address}") as client:
            with pytest.raises(grpc.aio.AioRpcError, match="no worker has registered yet"):
                await client.generate(text_prompt("hello"), **GREEDY)

        asked = [sum(cluster.outcomes.values()) for cluster in (first, second)]
        assert sorted(asked) == [0, 1]
        first.calls, second.calls = asked


async def test_a_session_whose_router_is_gone_goes_on_with_another(doors: list[Door], client: RachisClient) -> None:
    async with client.session("hello", **GREEDY) as session:
        await session.append("x" * 600)
        await until(lambda: bool(session.refusals))
        with pytest.raises(RefusedError):
            await session.append(" lost")
        await session.append(" wide")
        lost, other = await the_one_that_is_open(doors)

        await lost.cut()
        await session.append(" world")
        text = "".join([delta.text async for delta in session.finish("!")])

    assert text == session_text("hello wide world!")
    assert session.routers_lost == 1
    assert [refusal.message_number for refusal in session.refusals] == [2]
    expect_calls(lost, other)


async def test_refusals_of_another_router_name_the_message_as_it_was_sent(
    doors: list[Door], client: RachisClient
) -> None:
    async with client.session("hello", **GREEDY) as session:
        await session.append("x" * 600)
        await until(lambda: bool(session.refusals))
        with pytest.raises(RefusedError):
            await session.append(" lost")
        lost, other = await the_one_that_is_open(doors)
        await lost.cut()
        await until(lambda: session.routers_lost == 1)

        await session.append("y" * 600)
        await until(lambda: len(session.refusals) == 2)

        assert [refusal.message_number for refusal in session.refusals] == [2, 3]
    expect_calls(lost, other)


async def test_a_session_is_finished_while_its_router_goes(doors: list[Door], client: RachisClient) -> None:
    hold(doors)
    async with client.session("hello", **GREEDY) as session:
        answer = asyncio.create_task(collected(session))
        lost, other = await the_one_that_runs(doors)
        await lost.cut()
        release(other)

        assert await answer == session_text("hello world")
    expect_calls(lost, other)


async def test_an_answer_that_has_begun_ends_with_its_router(doors: list[Door], client: RachisClient) -> None:
    for door in doors:
        named(door.cluster, "decode-0").engine.hold_before(4)
    async with client.session("hello", **GREEDY) as session:
        answer = asyncio.create_task(collected(session))
        await until(lambda: session.first_token is not None)
        lost, _ = await the_one_that_is_open(doors)
        await lost.cut()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert session.routers_lost == 0
    expect_calls(lost)


async def test_a_session_of_which_too_much_was_sent_stays_with_its_router(
    doors: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.client.routers.KEPT_BYTES", 100)
    async with (
        RachisClient(",".join(door.address for door in doors)) as client,
        client.session("hello", **GREEDY) as session,
    ):
        await session.append("x" * 100)
        lost, _ = await the_one_that_is_open(doors)
        await lost.cut()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collected(session)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    expect_calls(lost)


@pytest.mark.parametrize(
    ("addresses", "why"),
    [
        ("router-a:7421,router-b:7421", r"'router-a:7421' is not ip:port"),
        ("127.0.0.1:7421,127.0.0.1", r"'127.0.0.1' is not ip:port"),
        ("127.0.0.1:7421,[::1]:7421", "all IPv4 or all IPv6"),
    ],
)
def test_addresses_that_are_no_list_of_routers_are_refused(addresses: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        RachisClient(addresses)


async def the_one_that_is_open(doors: list[Door]) -> tuple[Door, Door]:
    await until(lambda: any(door.cluster.parts.router.open_sessions for door in doors))
    return (doors[0], doors[1]) if doors[0].cluster.parts.router.open_sessions else (doors[1], doors[0])


async def collected(session: ClientSession) -> str:
    deltas: list[generation.CompletionDelta] = [delta async for delta in session.finish(" world")]
    return "".join(delta.text for delta in deltas)
