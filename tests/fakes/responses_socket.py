"""A WebSocket of `/v1/responses` without a network, and what is said over it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster_configs.schema import WebSocketSection
from control_plane.gateway.client_events import Append, ClientEvent, Create, Finish, SocketError
from control_plane.gateway.responses_socket import ResponsesSocket

CREATE = '{"type": "response.create", "input": "a"}'
APPEND = '{"type": "response.append", "text": "a"}'
GONE: dict[str, Any] = {"type": "websocket.disconnect", "code": 1001}


class Socket:
    """In place of Starlette's. said: what the client is told, an end as its code."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.is_gone = False

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send_text(self, frame: str) -> None:
        if self.is_gone:
            raise WebSocketDisconnect(1006)
        self.said.put_nowait(json.loads(frame))

    async def close(self, code: int, reason: str) -> None:
        self.said.put_nowait((code, reason))


class Talk:
    """Answers each event with its name; a response that is generated waits to be let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.was_cancelled = self.is_closed = False

    async def frames(self, event: ClientEvent) -> AsyncGenerator[str, None]:
        if isinstance(event, Append) and event.text == "bad":
            raise SocketError("is bad", code="c", param="text")
        if isinstance(event, Create | Finish):
            self.begun.set()
            try:
                yield json.dumps({"type": "begun"})
                await self.goes_on.wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        yield json.dumps({"type": type(event).__name__})

    async def close(self) -> None:
        self.is_closed = True


class Play:
    def __init__(self, **section: Any) -> None:
        self.socket, self.talk = Socket(), Talk()
        made = ResponsesSocket(cast(WebSocket, self.socket), self.talk, WebSocketSection(**section))
        self.run = asyncio.create_task(made.run())

    def send(self, *frames: str | bytes) -> None:
        for frame in frames:
            kind = "bytes" if isinstance(frame, bytes) else "text"
            self.socket.incoming.put_nowait({"type": "websocket.receive", kind: frame})

    async def said(self) -> Any:
        said = await asyncio.wait_for(self.socket.said.get(), 10)
        return said["error"]["code"] if isinstance(said, dict) and said["type"] == "error" else said

    async def leave(self) -> None:
        self.socket.incoming.put_nowait(GONE)
        await asyncio.wait_for(self.run, 10)
        assert self.talk.is_closed
