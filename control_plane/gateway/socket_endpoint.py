"""`/v1/responses` as a WebSocket, beside vLLM's routes: a gateway process takes so many connections and no more."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from rachis.errors import RachisError, UnauthenticatedError
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from cluster_configs.schema import WebSocketSection
from control_plane.gateway.callers import CALLER, Caller, client_of
from control_plane.gateway.client_events import ClientEvent, SocketError
from control_plane.gateway.conversation import Conversation, Responses, Store
from control_plane.gateway.kept_responses import KeptResponses
from control_plane.gateway.responses_socket import ResponsesSocket, Talk, max_bytes
from control_plane.gateway.warm_prompt import Outcomes, Sessions, WarmPrompt

PATH = "/v1/responses"
_MIB = 1 << 20
_RETRY_AFTER_S = 1


class TalkOfCaller:
    """A talk that goes on as long as its caller's key is good."""

    def __init__(self, talk: Talk, caller: Caller) -> None:
        self._talk = talk
        self._caller = caller

    async def frames(self, event: ClientEvent) -> AsyncGenerator[str, None]:
        """Raises SocketError."""
        try:
            await self._caller.check()
        except UnauthenticatedError as error:
            raise SocketError(str(error), code="invalid_api_key", status=401) from None
        except RachisError as error:
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            raise SocketError(str(error), code="server_overloaded", status=503, headers=headers) from None
        async with aclosing(self._talk.frames(event)) as frames:
            async for frame in frames:
                yield frame

    async def close(self) -> None:
        await self._talk.close()


class SocketEndpoint:
    """client: of the routers. store: of responses, where there is one. connections: how many are open. sessions: what
    became of those of this process."""

    def __init__(self, responses: Responses, client: Sessions, store: Store | None, section: WebSocketSection) -> None:
        self._responses = responses
        self._client = client
        self._store = store
        self._section = section
        self.connections = 0
        self.sessions = Outcomes()

    def attach(self, app: FastAPI) -> None:
        app.router.routes.append(WebSocketRoute(PATH, self.connected))

    async def connected(self, socket: WebSocket) -> None:
        if self.connections >= self._section.max_connections:
            await socket.send_denial_response(self._full())
            return
        self.connections += 1
        try:
            memory = KeptResponses(self._section.max_responses, int(self._section.max_kept_mib * _MIB))
            prompt = WarmPrompt(client_of(CALLER.get(), self._client), self.sessions)
            most = max_bytes(self._section)
            talk = Conversation(self._responses, prompt, memory, self._store, socket, most)
            caller = CALLER.get()
            asked = talk if caller is None else TalkOfCaller(talk, caller)
            await ResponsesSocket(socket, asked, self._section).run()
        finally:
            self.connections -= 1

    def _full(self) -> JSONResponse:
        sentence = f"This gateway has {self._section.max_connections} WebSocket connections, which is its limit."
        error: dict[str, Any] = {"type": "rate_limit_error", "code": "too_many_connections", "message": sentence}
        return JSONResponse({"error": error}, status_code=429, headers={"Retry-After": str(_RETRY_AFTER_S)})
