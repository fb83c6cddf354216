"""A client of two routers, each with workers of its own here, over connections that are cut."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rachis import AsyncClient, AsyncSession, Generated, Received, RefusedError, text_prompt
from rachis.errors import InvalidInputError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

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
        self.connections: list[asyncio.StreamWriter] = []

    async def open(self, address: str = f"{_HOST}:0") -> None:
        self._server = await asyncio.start_server(self._serve, *address.split(":"))
        self.address = f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        self._server.close()
        while self.connections:
            self.connections.pop().transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(*self.cluster.router.address.rsplit(":", 1))
        self.connections += (writer, behind[1])
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
async def client(doors: list[Door]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(",".join(door.address for door in doors)) as client:
        yield client


def engines(door: Door) -> list[Any]:
    return [named(door.cluster, name).engine for name in ("prefill-0", "decode-0")]


def hold(doors: list[Door], steps: int = 0) -> None:
    for door in doors:
        for engine in engines(door):
            engine.hold_before(steps)


async def follow(client: AsyncClient, answer: Generated, **sampling: Any) -> None:
    async for piece in client.stream(text_prompt("hello"), **sampling):
        if isinstance(piece, generation.Completion):
            answer.completion = piece
        else:
            answer.add(piece)


def decoded(door: Door) -> bool:
    """As far as it may."""
    return bool(named(door.cluster, "decode-0").engine.held.is_set())


def sample(door: Door, name: str, **labels: str) -> float | None:
    return door.cluster.router.metrics.registry.get_sample_value(name, labels)


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
    doors: list[Door], client: AsyncClient
) -> None:
    hold(doors)
    request = asyncio.create_task(client.generate(text_prompt("hello"), **GREEDY))
    lost, other = await the_one_that_runs(doors)

    await lost.cut()
    release(other)

    assert (await request).text == whole_text()
    expect_calls(lost, other)


async def test_requests_go_to_the_routers_that_are_there(doors: list[Door], client: AsyncClient) -> None:
    await doors[0].cut()

    for _ in range(4):
        assert (await client.generate(text_prompt("hello"), **GREEDY)).text == whole_text()
        expect_calls(doors[1])


async def test_a_request_that_kills_routers_is_not_given_to_a_third(doors: list[Door], client: AsyncClient) -> None:
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
        async with AsyncClient(f"{first.router.address},{second.router.address}") as client:
            with pytest.raises(grpc.aio.AioRpcError, match="no worker has registered yet"):
                await client.generate(text_prompt("hello"), **GREEDY)

        asked = [sum(cluster.outcomes.values()) for cluster in (first, second)]
        assert sorted(asked) == [0, 1]
        first.calls, second.calls = asked


async def test_a_session_whose_router_is_gone_goes_on_with_another(doors: list[Door], client: AsyncClient) -> None:
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
    doors: list[Door], client: AsyncClient
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


async def test_a_session_is_finished_while_its_router_goes(doors: list[Door], client: AsyncClient) -> None:
    hold(doors)
    async with client.session("hello", **GREEDY) as session:
        answer = asyncio.create_task(collected(session))
        lost, other = await the_one_that_runs(doors)
        await lost.cut()
        release(other)

        assert await answer == session_text("hello world")
    expect_calls(lost, other)


@pytest.mark.parametrize("mode", ["append", "update"])
async def test_a_session_whose_answer_has_begun_goes_on_with_another_router(
    doors: list[Door], client: AsyncClient, mode: Any
) -> None:
    for door in doors:
        named(door.cluster, "decode-0").engine.hold_before(4)
    async with client.session("hello", mode=mode, **GREEDY) as session:
        if mode == "update":
            await session.update(" old")
            await session.update(" new")
        answer = asyncio.create_task(collected(session))
        await until(lambda: session.first_token is not None)
        lost, other = await the_one_that_is_open(doors)
        await until(lambda: decoded(lost))
        release(other)
        await lost.cut()

        assert await answer == session_text("hello world" if mode == "append" else "hello new world")
    assert (session.routers_lost, client.resumes) == (1, 1)
    assert 0 < session.completion.route.resumed_tokens < 8
    assert session.completion.usage.completion_tokens == 8
    (job,) = named(other.cluster, "decode-0").engine.jobs
    assert job.emitted is not None and len(job.emitted.token_ids) > session.completion.route.resumed_tokens
    release(lost)
    expect_calls(lost, other)


@pytest.mark.parametrize("sampling", [{}, {"seed": 5, "temperature": 1.0}])
async def test_an_answer_that_has_begun_goes_on_with_another_router(
    doors: list[Door], client: AsyncClient, sampling: dict[str, Any]
) -> None:
    for door in doors:
        named(door.cluster, "decode-0").engine.hold_before(4)
    answer = Generated()
    request = asyncio.create_task(follow(client, answer, **{**GREEDY, **sampling}))
    lost, other = await the_one_that_runs(doors)
    await until(lambda: decoded(lost) and bool(answer.token_ids))
    release(other)
    await lost.cut()

    await request
    assert answer.text == whole_text(seed=sampling.get("seed"))
    assert len(answer.token_ids) == answer.completion.usage.completion_tokens == 8
    assert client.resumes == 1
    assert sample(other, "rachis_resumed_requests_total") == 1
    # Its first token was told elsewhere, and its prompt counted.
    assert sample(other, "rachis_request_ttft_seconds_count", **{"class": "interactive"}) == 0
    release(lost)
    expect_calls(lost, other)


async def test_an_answer_goes_on_from_router_to_router_as_long_as_something_comes_of_it(
    doors: list[Door], client: AsyncClient
) -> None:
    for door in doors:
        named(door.cluster, "decode-0").engine.hold_before(3)
    answer = Generated()
    request = asyncio.create_task(follow(client, answer, **GREEDY))
    lost, other = await the_one_that_runs(doors)
    await until(lambda: decoded(lost) and bool(answer.token_ids))
    named(other.cluster, "decode-0").engine.hold_before(6)
    had = len(answer.token_ids)
    await lost.cut()
    await until(lambda: decoded(other) and len(answer.token_ids) > had)
    release(lost)
    await lost.open(lost.address)
    await until(lambda: bool(lost.connections))
    await other.cut()
    release(other)

    await request
    assert answer.text == whole_text()
    assert client.resumes == 2
    expect_calls(lost, other, lost)


async def test_an_answer_waits_for_the_only_router_to_be_there_again(doors: list[Door]) -> None:
    door = doors[0]
    named(door.cluster, "decode-0").engine.hold_before(4)
    async with AsyncClient(door.address) as client:
        answer = Generated()
        request = asyncio.create_task(follow(client, answer, **GREEDY))
        await until(lambda: decoded(door) and bool(answer.token_ids))
        await door.cut()
        # Longer than a call would take to fail.
        await asyncio.sleep(2.0)
        release(door)
        await door.open(door.address)
        await request

    assert answer.text == whole_text()
    assert (client.resumes, answer.completion.usage.completion_tokens) == (1, 8)
    expect_calls(door, door)


async def test_an_answer_whose_completion_alone_is_missing_gets_it_from_another_router(
    doors: list[Door], client: AsyncClient
) -> None:
    request = api.GenerateRequest(prompt=text_prompt("hello"), sampling=generation.SamplingParams(**GREEDY))
    async with AsyncClient(doors[0].address) as first, AsyncClient(doors[1].address) as second:
        received = Received()
        async for response in first.call(request):
            received.add(response.delta)
            if response.delta.finish_reason:
                break
        resumed = second.resume(request, [received])
        (completed,) = [response async for response in resumed]

    assert completed.completion.finish_reason == generation.FINISH_REASON_LENGTH
    assert completed.completion.usage == generation.Usage(prompt_tokens=5, completion_tokens=8)
    assert completed.completion.route.resumed_tokens == 8
    assert not named(doors[1].cluster, "decode-0").engine.jobs
    expect_calls(*doors)


async def test_a_session_of_which_too_much_was_sent_stays_with_its_router(
    doors: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client's package has no setting for tests; 64 MiB would show no more.
    monkeypatch.setattr("rachis.routers.KEPT_BYTES", 100)
    async with (
        AsyncClient(",".join(door.address for door in doors)) as client,
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
        AsyncClient(addresses)


async def the_one_that_is_open(doors: list[Door]) -> tuple[Door, Door]:
    await until(lambda: any(door.cluster.parts.router.open_sessions for door in doors))
    return (doors[0], doors[1]) if doors[0].cluster.parts.router.open_sessions else (doors[1], doors[0])


async def collected(session: AsyncSession) -> str:
    deltas: list[generation.CompletionDelta] = [delta async for delta in session.finish(" world")]
    return "".join(delta.text for delta in deltas)
