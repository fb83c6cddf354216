"""Whose HTTP request it is: asked of a router by the key that the request brings, and remembered for a moment.

The router is asked again, with the same key, by whatever the request needs of it: what is remembered here opens no more
than what a gateway answers by itself.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from rachis import AsyncClient, RachisError
from rachis.errors import PermissionDeniedError
from rachis.metadata_channel import key_metadata
from starlette.websockets import WebSocket

from cluster_core.clock import monotonic_s
from control_plane.access.access import CLIENT_ADDRESS, SERVICE_KEY
from control_plane.access.roles import Identity, Need, Role, need_of_route

_ASK_TIMEOUT_S = 5.0
_REMEMBERED_S = 2.0
_MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """Of one HTTP request. client: of the routers, for this caller."""

    identity: Identity
    client: AsyncClient


# Of the request that is answered; None where a service has no keys.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def tenant() -> str:
    """Whose request is answered."""
    caller = CALLER.get()
    return caller.identity.tenant if caller is not None else ""


def client_of(caller: Caller | None, otherwise: Any) -> Any:
    """By whom a router is asked for a caller."""
    return caller.client if caller is not None else otherwise


class Callers:
    """ASGI middleware, the outermost. service_key: of the service's own processes. answer: makes one of an error, and
    of the path that was asked."""

    def __init__(
        self, app: Any, client: AsyncClient, service_key: str, answer: Callable[[RachisError, str], JSONResponse]
    ) -> None:
        self._app = app
        self._client = client
        self._service_key = service_key
        self._answer = answer
        self._identities = _Identities(_MOST_REMEMBERED)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        need = need_of_route(scope.get("method", "GET"), path)
        if need is not Need.NOTHING:
            try:
                CALLER.set(await self._caller(scope, need))
            except RachisError as error:
                await _refuse(self._answer(error, path), scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Any, need: Need) -> Caller:
        """Raises RachisError."""
        address = scope["client"][0] if scope.get("client") else ""
        given = _key(scope["headers"])
        metadata = (*key_metadata(given), (SERVICE_KEY, self._service_key), (CLIENT_ADDRESS, address))
        client = self._client.calling_with(metadata)
        identity = await self._identities.of(given, address, client)
        if not identity.may(need):
            has = ", ".join(sorted(identity.roles)) or "none"
            raise PermissionDeniedError.local(f"this needs the role `{need}`; the key `{identity.name}` has {has}")
        return Caller(identity, client)


class _Identities:
    """By digest of a key, for a moment: who it is, or how the router refused it. It is asked once at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Tables by what a key's digest under this is tell nobody a key.
        self._digest_key = secrets.token_bytes(32)
        self._found: OrderedDict[bytes, tuple[asyncio.Future[Identity], float]] = OrderedDict()

    async def of(self, given: str, address: str, client: AsyncClient) -> Identity:
        """Raises RachisError."""
        digest = hashlib.blake2b(f"{address}\n{given}".encode(), key=self._digest_key, digest_size=16).digest()
        now_s = monotonic_s()
        found, until_s = self._found.get(digest, (None, 0.0))
        if found is None or now_s > until_s:
            found = asyncio.ensure_future(_asked(client))
            # Where nobody waits for it any more.
            found.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._found[digest] = found, now_s + _REMEMBERED_S
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return await asyncio.shield(found)


async def _asked(client: AsyncClient) -> Identity:
    """Raises RachisError."""
    response = await client.identity(_ASK_TIMEOUT_S)
    roles = frozenset(Role(role) for role in response.roles)
    return Identity(response.name, response.tenant, roles, response.lowest_priority)


def _key(headers: list[tuple[bytes, bytes]]) -> str:
    """As OpenAI's clients bring it, or Anthropic's; empty: none, or several that differ."""
    given = set()
    for name, value in headers:
        text = value.decode("latin-1")
        if name == b"x-api-key":
            given.add(text.strip())
        elif name == b"authorization" and text[:7].lower() == "bearer ":
            given.add(text[7:].strip())
    only = given.pop() if len(given) == 1 else ""
    # Metadata of gRPC takes no other; and no key has any.
    return only if only.isascii() and only.isprintable() else ""


async def _refuse(answer: JSONResponse, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(answer)
    else:
        await answer(scope, receive, send)
