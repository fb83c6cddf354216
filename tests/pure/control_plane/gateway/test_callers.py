"""Whose HTTP request it is: what is asked of a router, what is remembered, and what passes without a key."""

import asyncio
import json
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from rachis import RachisError
from rachis.errors import DeadlineError, UnauthenticatedError, UnavailableError
from rachis.v1 import router_pb2 as api

from control_plane.gateway.callers import CALLER, Callers, Identities, tenant
from control_plane.gateway.client_events import Create, SocketError
from control_plane.gateway.socket_endpoint import TalkOfCaller

GOOD = "rk-good"


class Router:
    """In place of a client of the routers. good: its keys; others are refused. asked: the keys, waited_s: how long."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.asked: list[str] = []
        self.waited_s: list[float] = []
        self.fault: RachisError | None = None
        self.good = {GOOD}
        self._is_open = is_open
        self.key = ""

    def calling_with(self, metadata: Any) -> "Router":
        other = Router.__new__(Router)
        other.__dict__ = dict(self.__dict__)
        other.key = dict(metadata).get("authorization", "").removeprefix("Bearer ")
        return other

    async def identity(self, timeout_s: float) -> api.GetIdentityResponse:
        self.asked.append(self.key)
        self.waited_s.append(timeout_s)
        if self.fault is not None:
            raise self.fault
        if not self._is_open and self.key not in self.good:
            raise UnauthenticatedError.local("no")
        return api.GetIdentityResponse(name="chat", tenant="acme", roles=["generate"], is_open=self._is_open)


class Gateway:
    """seen: the tenant of each request that came through. certificate: that connections have shown."""

    def __init__(self, router: Router, *, may_be_open: bool = False, hand_on: Any = None) -> None:
        self.seen: list[str] = []
        self.certificate = b""
        client: Any = router
        self.app = Callers(self._app, client, _answer, may_be_open=may_be_open, hand_on=hand_on)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(tenant())

    async def ask(self, path: str, headers: dict[str, str] | None = None, method: str = "POST") -> int:
        """Its status; 0 where it came through."""
        status = 0

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        pairs = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        state = {"rachis.client_certificate": self.certificate} if self.certificate else {}
        scope = {"type": "http", "method": method, "path": path, "headers": pairs, "state": state}
        await self.app(scope, None, send)
        return status


def _answer(error: RachisError, path: str) -> JSONResponse:
    statuses = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}
    return JSONResponse(json.loads("{}"), status_code=statuses.get(error.status, 503))


BEARER = {"authorization": f"Bearer {GOOD}"}


async def test_a_key_is_asked_for_once_and_remembered_for_a_moment() -> None:
    router = Router()
    gateway = Gateway(router)
    assert [await gateway.ask("/v1/completions", BEARER) for _ in range(3)] == [0, 0, 0]
    assert await gateway.ask("/v1/messages", {"x-api-key": GOOD}) == 0
    assert (gateway.seen, router.asked) == (["acme"] * 4, [GOOD])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer rk-bad"}, 401),
        ({"authorization": GOOD}, 401),
        ({**BEARER, "x-api-key": "rk-bad"}, 401),
        ({"authorization": f"Bearer {GOOD}{'x' * 5000}"}, 401),
        ({"authorization": "Bearer rk-gööd"}, 401),
    ],
)
async def test_without_a_good_key_nothing_comes_through(headers: dict[str, str], status: int) -> None:
    gateway = Gateway(Router())
    assert await gateway.ask("/v1/completions", headers) == status
    assert not gateway.seen


async def test_who_brings_no_key_is_not_whom_the_gateways_certificate_names() -> None:
    """The router is told that somebody calls who has none: without a word it would go by the certificate."""
    router = Router()
    assert await Gateway(router).ask("/v1/completions") == 401
    assert router.asked == ["Bearer"]


def handed_on(certificate: bytes) -> Any:
    return (("authorization", f"Bearer of {certificate.decode()}"),)


async def test_a_certificate_is_handed_on_where_no_key_is_brought_and_remembered_by_itself() -> None:
    router = Router()
    router.good.add("of chat")
    gateway = Gateway(router, hand_on=handed_on)
    for certificate, status in ((b"chat", 0), (b"chat", 0), (b"other", 401), (b"", 401)):
        gateway.certificate = certificate
        assert await gateway.ask("/v1/completions") == status
    assert router.asked == ["of chat", "of other", "Bearer"]


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_who_brings_a_key_is_judged_by_that_alone_good_or_not(name: str) -> None:
    router = Router()
    router.good.add("of chat")
    gateway = Gateway(router, hand_on=handed_on)
    gateway.certificate = b"chat"
    for value in ("rk-bad", "", "Bearer rk-bad", "Bearer ", "Basic eA=="):
        assert await gateway.ask("/v1/completions", {name: value}) == 401, value
    assert "of chat" not in router.asked


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://gateway:8000", "host": "gateway:8000", "sec-fetch-site": "same-origin"}, 0),
        ({"host": "gateway:8000", "sec-fetch-site": "none"}, 0),
        ({"origin": "https://evil.example", "host": "gateway:8000"}, 403),
        ({"origin": "null", "host": "gateway:8000"}, 403),
        ({"host": "gateway:8000", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "gateway:8000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example", "host": "gateway:8000", "sec-fetch-site": "cross-site", **BEARER}, 0),
    ],
)
async def test_another_sites_page_does_not_call_with_the_browsers_certificate(
    headers: dict[str, str], status: int
) -> None:
    router = Router()
    router.good.add("of chat")
    gateway = Gateway(router, hand_on=handed_on)
    gateway.certificate = b"chat"
    assert await gateway.ask("/v1/responses", headers) == status
    assert bool(gateway.seen) is not bool(status)


@pytest.mark.parametrize("certificate", [b"chat", b"x" * 5000])
async def test_a_certificate_that_is_not_to_be_handed_on_opens_nothing(certificate: bytes) -> None:
    router = Router()
    router.good.add("of chat")
    gateway = Gateway(router, hand_on=handed_on if len(certificate) > 4096 else None)
    gateway.certificate = certificate
    assert await gateway.ask("/v1/completions") == 401
    # It is not asked for what is too large.
    assert router.asked == ([] if len(certificate) > 4096 else ["Bearer"])


async def test_a_role_that_is_missing_is_said() -> None:
    gateway = Gateway(Router())
    assert await gateway.ask("/metrics", BEARER, "GET") == 403 and not gateway.seen


async def test_a_browsers_question_needs_no_key_and_other_options_do() -> None:
    gateway = Gateway(Router())
    preflight = {"origin": "https://a", "access-control-request-method": "POST"}
    assert await gateway.ask("/v1/completions", preflight, "OPTIONS") == 0
    for headers in ({}, {"origin": "https://a"}):
        assert await gateway.ask("/metrics", headers, "OPTIONS") == 401
    assert gateway.seen == [""]


async def test_what_needs_no_key_is_nobodys_whoever_asked_before() -> None:
    gateway = Gateway(Router())
    await gateway.ask("/v1/completions", BEARER)
    await gateway.ask("/health", method="GET")
    assert gateway.seen == ["acme", ""]


async def test_a_router_that_is_away_is_asked_again_at_once() -> None:
    router, identities = Router(), Identities(may_be_open=False)
    router.fault = UnavailableError.local("away")
    client: Any = router
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await identities.of(GOOD, client)
        # What is not remembered is taken out when the loop comes to it.
        await asyncio.sleep(0)
    assert len(router.asked) == 2


async def test_a_router_that_says_nothing_is_waited_for_as_by_a_request_and_is_then_not_there() -> None:
    router, identities = Router(), Identities(may_be_open=False)
    router.fault = DeadlineError.local("in time")
    client: Any = router
    with pytest.raises(UnavailableError, match="no router has said in time whose the key is"):
        await identities.of(GOOD, client)
    assert router.waited_s == [60.0]


async def test_that_a_key_is_wrong_is_remembered() -> None:
    router = Router()
    gateway = Gateway(router)
    assert [await gateway.ask("/v1/models", {"x-api-key": "rk-bad"}, "GET") for _ in range(3)] == [401] * 3
    assert router.asked == ["rk-bad"]


@pytest.mark.parametrize(("may_be_open", "status"), [(True, 0), (False, 503)])
async def test_a_router_without_keys_is_served_on_loopback_alone(may_be_open: bool, status: int) -> None:
    gateway = Gateway(Router(is_open=True), may_be_open=may_be_open)
    assert await gateway.ask("/v1/completions") == status


async def test_a_connection_ends_its_talk_when_its_key_does() -> None:
    class Talk:
        async def frames(self, event: Any) -> Any:
            yield "said"

        async def close(self) -> None:
            pass

    router = Router()
    gateway = Gateway(router)
    callers = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        callers.append(CALLER.get())

    now_s = 0.0
    gateway.app = Callers(app, router, _answer, may_be_open=False, now_s=lambda: now_s)  # type: ignore[arg-type]
    await gateway.ask("/v1/responses", BEARER)
    (caller,) = callers
    assert caller is not None
    talk, event = TalkOfCaller(Talk(), caller), Create({}, (), None, generates=False)
    assert [frame async for frame in talk.frames(event)] == ["said"]
    router.good.clear()
    now_s = 3.0
    with pytest.raises(SocketError) as raised:
        async for _ in talk.frames(event):
            pass
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
