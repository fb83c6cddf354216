"""Peers that send heads without an end, and peers that take nothing of their answers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvicorn

from control_plane.gateway.bounded_peer import MOST_HEAD_BYTES, BoundedPeerProtocol

OPENING = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
PIECE = b"b" * 10_000
MANY = 200


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the tests."""
        yield


class Application:
    """Answers with b"ok", or for ever. asked: how many headers each request had."""

    def __init__(self, *, is_endless: bool = False) -> None:
        self.asked: list[int] = []
        self.has_ended = asyncio.Event()
        self._is_endless = is_endless

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(len(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            if self._is_endless:
                await self._stream(receive, send)
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.has_ended.set()

    async def _stream(self, receive: Any, send: Any) -> None:
        """As Starlette does it: until its client is gone."""

        async def pieces() -> None:
            while True:
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})

        streaming = asyncio.create_task(pieces())
        while (await receive())["type"] != "http.disconnect":
            pass
        streaming.cancel()


class Impatient(BoundedPeerProtocol):
    send_timeout_s = 0.05


@asynccontextmanager
async def peer(
    app: Application, protocol: type[BoundedPeerProtocol] = BoundedPeerProtocol
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = Server(uvicorn.Config(app, http=protocol, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname(), limit=1 << 16)
        try:
            yield reader, writer
        finally:
            writer.close()
            server.should_exit = True
            await serving


async def sent(writer: asyncio.StreamWriter, *pieces: bytes) -> int:
    """How many bytes were taken before the connection was closed."""
    taken = 0
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 10)
            taken += len(piece)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return taken


@pytest.mark.parametrize(
    "pieces",
    [
        (OPENING, *[b"x: " + PIECE + b"\r\n"] * MANY),
        (OPENING + b"x: ", *[PIECE] * MANY),
        (OPENING, *[PIECE] * MANY),
        (b"POST /", *[PIECE] * MANY),
        (OPENING, *[b"x:\r\n" * 2_500] * MANY),
        (OPENING + CHUNKED, *[b"x: " + PIECE + b"\r\n"] * MANY),
    ],
    ids=["headers", "a value", "a name", "a url", "short headers", "trailers"],
)
async def test_a_head_without_an_end_ends_its_connection(pieces: tuple[bytes, ...]) -> None:
    app = Application()
    async with peer(app) as (_, writer):
        assert await sent(writer, *pieces) < len(b"".join(pieces))
        # Of trailers the request itself is whole.
        assert len(app.asked) == (OPENING + CHUNKED in pieces)


async def test_a_head_that_is_too_large_is_answered_with_the_limit() -> None:
    app = Application()
    async with peer(app) as (reader, writer):
        await sent(writer, OPENING + b"x: " + b"y" * MOST_HEAD_BYTES + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 400") and b"more than 65536 bytes, which is the limit." in answer
    assert app.asked == []


async def test_large_bodies_and_one_request_after_another_are_no_heads() -> None:
    app = Application()
    body = b"content-length: 2000000\r\n\r\n" + b"z" * 2_000_000
    chunks = b"transfer-encoding: chunked\r\n\r\n" + (b"2710\r\n" + PIECE + b"\r\n") * 100 + b"0\r\n\r\n"
    head = OPENING + b"x: " + b"y" * (MOST_HEAD_BYTES - 200) + b"\r\n"
    async with peer(app) as (reader, writer):
        for rest in (body, chunks, b"content-length: 0\r\n\r\n"):
            await sent(writer, head + rest)
            assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)).startswith(b"HTTP/1.1 200")
    assert app.asked == [3, 3, 3]


async def test_a_peer_that_takes_nothing_of_its_answer_is_given_up() -> None:
    app = Application(is_endless=True)
    async with peer(app, Impatient) as (_, writer):
        await sent(writer, OPENING + b"\r\n")
        # Nobody reads: what is on its way fills up.
        await asyncio.wait_for(app.has_ended.wait(), 10)
