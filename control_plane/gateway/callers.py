"""Whose HTTP request it is: asked of a router by the key that the request brings, and remembered for a moment.

The router is asked again, with the same key, by whatever the request needs of it: what is remembered here opens no more
than what a gateway answers by itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from rachis import AsyncClient, RachisError
from rachis.errors import DeadlineError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from rachis.metadata_channel import NO_KEY, Metadata, key_metadata
from rachis.v1 import router_pb2 as api
from starlette.websockets import WebSocket

from cluster_core.clock import monotonic_s
from control_plane.access.foreign_pages import refusal_of_page
from control_plane.access.key_digests import KeyDigests
from control_plane.access.roles import Identity, Need, Role, need_of_route
from control_plane.gateway.shown_certificate import shown_certificate

# As long as a request waits for a router, or for another one, where no key is asked for.
_ASK_TIMEOUT_S = 60.0
_REMEMBERED_S = 2.0
_MOST_REMEMBERED = 4096
_MOST_KEY_CHARACTERS = 4096
# gRPC takes some 8 KiB of metadata in all, and writes bytes in base64.
_MOST_CERTIFICATE_BYTES = 4096
# A browser asks with these whether it may ask, and brings no key; vLLM's front answers that by itself.
_PREFLIGHT = frozenset({b"origin", b"access-control-request-method"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Of one HTTP request, or of a WebSocket. client: of the routers, for this caller. key: what was brought, or a name
    for the certificate that was shown."""

    identity: Identity
    client: AsyncClient
    identities: "Identities"
    key: str

    async def check(self) -> None:
        """Whether the key is still good. Raises RachisError."""
        await self.identities.of(self.key, self.client)


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
    """ASGI middleware, the outermost. may_be_open: routers may have no keys. answer: makes one of an error, and of the
    path that was asked. hand_on: metadata by which a router is told of the certificate that a caller has shown, DER,
    where routers know callers by them."""

    def __init__(
        self,
        app: Any,
        client: AsyncClient,
        answer: Callable[[RachisError, str], JSONResponse],
        *,
        may_be_open: bool,
        hand_on: Callable[[bytes], Metadata] | None = None,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._app = app
        self._hand_on = hand_on
        self._client = client
        self._answer = answer
        self._identities = Identities(may_be_open=may_be_open, now_s=now_s)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A connection's next request may begin in the context of the one before.
        CALLER.set(None)
        if scope["type"] in ("http", "websocket") and not _is_preflight(scope):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            need = need_of_route(path)
            if need is not Need.NOTHING:
                try:
                    CALLER.set(await self._caller(scope, need))
                except RachisError as error:
                    await _refuse(self._answer(error, path), scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Any, need: Need) -> Caller:
        """Raises RachisError."""
        certificate = shown_certificate(scope)
        if self._hand_on is not None and certificate and not _brings_key(scope["headers"]):
            if len(certificate) > _MOST_CERTIFICATE_BYTES:
                sentence = f"certificates of more than {_MOST_CERTIFICATE_BYTES} bytes are not handed on"
                raise UnauthenticatedError.local(sentence)
            sentence = refusal_of_page(_texts(scope["headers"]))
            if sentence:
                raise PermissionDeniedError.local(sentence)
            # No key has such a name: what is brought is printable.
            key, metadata = f"\0{certificate.hex()}", self._hand_on(certificate)
        else:
            key = _key(scope["headers"])
            metadata = key_metadata(key) or NO_KEY
        client = self._client.calling_with(metadata)
        identity = await self._identities.of(key, client)
        if not identity.may(need):
            raise PermissionDeniedError.local(identity.lacks(need))
        return Caller(identity, client, self._identities, key)


class Identities:
    """By digest of a key, for a moment: who it is, or that it is nobody. A router is asked once at a time."""

    def __init__(self, *, may_be_open: bool, now_s: Callable[[], float] = monotonic_s) -> None:
        self._may_be_open = may_be_open
        self._now_s = now_s
        self._digest = KeyDigests()
        self._found: OrderedDict[bytes, tuple[asyncio.Future[Identity], float]] = OrderedDict()

    async def of(self, key: str, client: AsyncClient) -> Identity:
        """Raises RachisError."""
        digest = self._digest(key)
        now_s = self._now_s()
        found, until_s = self._found.get(digest, (None, 0.0))
        if found is None or now_s > until_s:
            found = asyncio.ensure_future(self._asked(client))
            found.add_done_callback(lambda task: self._answered(digest, task))
            self._found[digest] = found, now_s + _REMEMBERED_S
            while len(self._found) > _MOST_REMEMBERED:
                self._found.popitem(last=False)
        return await asyncio.shield(found)

    def _answered(self, digest: bytes, task: "asyncio.Future[Identity]") -> None:
        """What says nothing of the key is not remembered."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (error is not None and not isinstance(error, UnauthenticatedError)):
            self._found.pop(digest, None)

    async def _asked(self, client: AsyncClient) -> Identity:
        """Raises RachisError."""
        try:
            response: api.GetIdentityResponse = await client.identity(_ASK_TIMEOUT_S)
        except DeadlineError:
            # Nothing of the request has begun.
            raise UnavailableError.local("no router has said in time whose the key is") from None
        if response.is_open and not self._may_be_open:
            raise UnavailableError.local("the router has no keys, and this gateway does not answer everybody")
        roles = frozenset(Role(role) for role in response.roles)
        return Identity(response.name, response.tenant, roles, response.lowest_priority)


def _is_preflight(scope: Any) -> bool:
    return scope.get("method") == "OPTIONS" and {name for name, _ in scope["headers"]} >= _PREFLIGHT


def _texts(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def _brings_key(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether it brings one, good or not: who does is judged by that alone."""
    return any(name in (b"authorization", b"x-api-key") for name, _ in headers)


def _key(headers: list[tuple[bytes, bytes]]) -> str:
    """As OpenAI's clients bring it, or Anthropic's; empty: none, several that differ, or what cannot be one."""
    given = set()
    for name, value in headers:
        text = value.decode("latin-1")
        if name == b"x-api-key":
            given.add(text.strip())
        elif name == b"authorization" and text[:7].lower() == "bearer ":
            given.add(text[7:].strip())
    only = given.pop() if len(given) == 1 else ""
    return only if len(only) <= _MOST_KEY_CHARACTERS and only.isascii() and only.isprintable() else ""


async def _refuse(answer: JSONResponse, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(answer)
    else:
        await answer(scope, receive, send)
