"""One WebSocket at `/v1/responses`, from its handshake to its end: OpenAI's WebSocket mode.

A task waits for the next frame at all times, so that a client that is gone cancels what is generated for it, and a
second `response.create` is refused while one runs. Frames that come while something short runs wait for its end; one
at most is taken in advance, the others stay in the network. Every wait ends: for a frame, for a client that takes
nothing, and for the connection as a whole.
"""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from typing import Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster_configs.schema import WebSocketSection
from control_plane.gateway.bounded_peer import SEND_TIMEOUT_S
from control_plane.gateway.client_events import ClientEvent, Create, Finish, SocketError, parsed

_MIB = 1 << 20
# By the WebSocket protocol's registry.
_NORMAL = 1000


class Talk(Protocol):
    """What a connection says in answer to its client's events, as frames."""

    def frames(self, event: ClientEvent) -> AsyncGenerator[str, None]:
        """Raises SocketError."""
        ...

    async def close(self) -> None: ...


class ResponsesSocket:
    """`run`, once."""

    def __init__(self, socket: WebSocket, talk: Talk, section: WebSocketSection) -> None:
        self._socket = socket
        self._talk = talk
        self._section = section
        self._max_bytes = max_bytes(section)
        self._reading: asyncio.Task[MutableMapping[str, Any]] | None = None

    async def run(self) -> None:
        await self._socket.accept()
        try:
            async with asyncio.timeout(self._section.lifetime_s) as lifetime:
                await self._serve()
        except WebSocketDisconnect:
            pass
        except TimeoutError:
            if not lifetime.expired():
                raise
            await self._end(
                f"The connection has lived for {self._section.lifetime_s:g} s, which is the limit; open a new one.",
                "websocket_connection_limit_reached",
            )
        finally:
            if self._reading is not None:
                self._reading.cancel()
            await self._talk.close()

    async def _serve(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._section.idle_timeout_s):
                    await asyncio.wait({self._read()})
            except TimeoutError:
                await self._end(
                    f"No event has come for {self._section.idle_timeout_s:g} s, which is the limit.",
                    "websocket_idle_timeout",
                )
                return
            try:
                event = parsed(self._taken(), self._max_bytes)
            except SocketError as error:
                await self._send(error.frame())
                continue
            await self._answer(event)

    def _read(self) -> asyncio.Task[MutableMapping[str, Any]]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._socket.receive())
        return self._reading

    def _taken(self) -> str | bytes:
        """The frame that has come. Raises WebSocketDisconnect where it is the end."""
        assert self._reading is not None
        message, self._reading = self._reading.result(), None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", _NORMAL))
        text, data = message.get("text"), message.get("bytes")
        return text if text is not None else data or b""

    async def _answer(self, event: ClientEvent) -> None:
        generates = isinstance(event, Finish) or (isinstance(event, Create) and event.generates)
        work = asyncio.create_task(self._send_all(event))
        try:
            while not work.done():
                reading = self._read()
                await asyncio.wait({work, reading}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    break
                if not generates and reading.result()["type"] != "websocket.disconnect":
                    # It waits its turn.
                    await asyncio.wait({work})
                else:
                    await self._send(_refusal_meanwhile(self._taken(), self._max_bytes).frame())
        finally:
            work.cancel()
            await asyncio.wait({work})
        work.result()

    async def _send_all(self, event: ClientEvent) -> None:
        try:
            async with aclosing(self._talk.frames(event)) as frames:
                async for frame in frames:
                    await self._send(frame)
        except SocketError as error:
            await self._send(error.frame())

    async def _send(self, frame: str) -> None:
        """Raises WebSocketDisconnect where nobody takes it."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.send_text(frame)
        except TimeoutError:
            raise WebSocketDisconnect(_NORMAL, "its client takes nothing") from None

    async def _end(self, sentence: str, code: str) -> None:
        try:
            await self._send(SocketError(sentence, code=code).frame())
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.close(_NORMAL, code)
        except (WebSocketDisconnect, TimeoutError):
            # Who is gone needs not be told.
            return


def max_bytes(section: WebSocketSection) -> int:
    return int(section.max_frame_mib * _MIB)


def _refusal_meanwhile(frame: str | bytes, limit: int) -> SocketError:
    try:
        parsed(frame, limit)
    except SocketError as error:
        return error
    return SocketError(
        "A response is being generated on this connection, and one at a time is; wait for its end or close.",
        code="response_already_in_flight", param="type",
    )  # fmt: skip
