"""Floods of connections and of sessions that nobody goes on with: others are served meanwhile, and nothing is left."""

import asyncio
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from control_plane.intake.turns import Turns
from tests.fakes.answers import text_of, whole_text
from tests.fakes.cluster import Cluster, until
from tests.fakes.session_call import SessionCall, session_open

SESSIONS = 1000
AT_ONCE = 50
CONNECTIONS = 300
# What comes to a port of gRPC that is none of it, none at all, or the beginning of it.
GREETINGS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(500))


async def test_a_thousand_sessions_opened_and_abandoned_leave_nothing(cluster: Cluster) -> None:
    for start in range(0, SESSIONS, AT_ONCE):
        channel = grpc.aio.insecure_channel(cluster.router.address)
        stub, calls = router_pb2_grpc.RouterServiceStub(channel), []
        for number in range(start, start + AT_ONCE):
            call = SessionCall(stub.StreamGenerate())  # type: ignore[call-arg]  # it is written to
            cluster.calls += 1
            calls.append(call.call)
            if number % 3:
                await call.send(open=session_open("hello", "APPEND"))
            if number % 3 == 2:
                await call.append("more")
        assert text_of(await cluster.generate()) == whole_text()
        # Some are cancelled, the others go with their connection.
        for each in calls[: AT_ONCE // 2]:
            each.cancel()
        await channel.close(None)
    await until(cluster.idle)
    assert cluster.parts.sessions.open_sessions == 0
    assert cluster.parts.admission.prompts.used_bytes == 0


async def test_requests_and_sessions_take_turns(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """How they do: tests/pure/control_plane/intake/test_turns.py."""
    run, taken = Turns.run, Counter[str]()

    async def counted(turns: Turns, work: Any) -> Any:
        taken[work.__qualname__] += 1
        return await run(turns, work)

    # Whether a request takes its turn is visible only while others wait for theirs.
    monkeypatch.setattr(Turns, "run", counted)
    await cluster.generate()
    session = cluster.session()
    await session.open()
    session.call.cancel()

    assert sorted(taken.values()) == [1, 1]


async def test_connections_that_say_nothing_or_nonsense_keep_nobody_out(cluster: Cluster) -> None:
    host, _, port = cluster.router.address.rpartition(":")
    with ExitStack() as open_ones:
        for number in range(CONNECTIONS):
            connection = open_ones.enter_context(socket.create_connection((host, int(port)), timeout=10))
            connection.sendall(GREETINGS[number % len(GREETINGS)])
            if number % 50 == 0:
                # The router runs on this loop.
                await asyncio.sleep(0)
        assert text_of(await cluster.generate()) == whole_text()
    assert text_of(await cluster.generate()) == whole_text()


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process may open so many files and sockets more."""
    used = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_router_that_has_used_up_its_file_descriptors_serves_who_is_there_and_others_afterwards(
    cluster: Cluster,
) -> None:
    assert text_of(await cluster.generate()) == whole_text()
    host, _, port = cluster.router.address.rpartition(":")
    with few_descriptors(8), ExitStack() as open_ones:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                open_ones.enter_context(socket.create_connection((host, int(port)), timeout=10))
        # Its client's connection, and those to its workers, are there already.
        assert text_of(await cluster.generate()) == whole_text()
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        cluster.calls += 1
        request = api.GenerateRequest(prompt=session_open("hello", "APPEND").prefix)
        request.sampling.CopyFrom(session_open("hello", "APPEND").sampling)
        assert text_of([response async for response in stub.Generate(request)]) == whole_text()
