"""Certificates of callers over HTTP: what a gateway hands on, what a router takes from whom, and the console's port.

The gateway here is what a real one is in front of vLLM's routes: uvicorn with TLS, and the middleware that finds out
who asks. In their place is an application that says who that is.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import uvicorn
import websockets
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from fastapi.responses import JSONResponse
from rachis import AsyncClient
from rachis.errors import RachisError
from rachis.metadata_channel import NO_KEY, Metadata
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from benchmarks.certificates import Authority
from cluster_configs.schema import SecuritySection
from cluster_wire.http_status import http_status
from cluster_wire.members import caller_metadata
from cluster_wire.secret import Secret, read_secret
from control_plane.access.key_file import edit
from control_plane.access.roles import HTTP_NEEDS, Identity, Need
from control_plane.gateway.callers import CALLER, Callers
from control_plane.gateway.gateway import client_of_routers, handing_on
from control_plane.gateway.shown_certificate import CertificateProtocol
from tests.fakes.cluster import named
from tests.process.control_plane.access.certified_world import (
    HOME,
    ONE_SENTENCE,
    Certified,
    certified_cluster,
    showing,
    told,
)
from tests.process.control_plane.access.conftest import WHO

FORGED = "rachis-caller-certificate-bin"
CONSOLE = {"content-type": "application/json"}


@pytest_asyncio.fixture
async def certified(tmp_path: Path, made: tuple[Path, dict[str, str]]) -> AsyncIterator[Certified]:
    async with certified_cluster(tmp_path, made, security__metrics_tls=True, security__metrics_need_key=True) as world:
        yield world


class Answering:
    """In place of vLLM's routes: who asks, and what a router generates for them."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        caller = CALLER.get()
        assert caller is not None
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            while (await receive())["type"] == "websocket.receive":
                await send({"type": "websocket.send", "text": await self._who(caller)})
            return
        if scope["path"] == "/v1/completions":
            await caller.client.generate("hello", max_tokens=4, temperature=0.0)
        await JSONResponse({"who": caller.identity.name, "tenant": caller.identity.tenant})(scope, receive, send)

    async def _who(self, caller: Any) -> str:
        try:
            await caller.check()
        except RachisError as refused:
            return refused.status
        return str(caller.identity.name)


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the tests."""
        yield


def _refusal(error: RachisError, path: str) -> JSONResponse:
    return JSONResponse({"said": str(error)}, status_code=http_status(error.status))


@asynccontextmanager
async def gateway(certified: Certified, own: tuple[Path, Path] | None = None, **lifecycle: Any) -> AsyncIterator[str]:
    """Its address. own: its certificate and key, where it is not that of the router. lifecycle: of uvicorn."""
    chain, key = own or certified.own_files
    folder = certified.keyed.keys_file.parent
    security = SecuritySection(
        secret_file=str(folder / "secret"),
        certificate_file=str(chain),
        certificate_key_file=str(key),
        ca_file=str(certified.authority.ca),
        client_ca_file=str(certified.authority.ca),
    )
    secret = read_secret(folder / "secret")
    async with client_of_routers(certified.address, security, secret.service_key) as client:
        hand_on = handing_on(secret, security, security.client_ca_file)
        app = Callers(Answering(), client, _refusal, may_be_open=False, hand_on=hand_on)
        config = uvicorn.Config(
            app, http=CertificateProtocol, lifespan="off", log_config=None, ssl_certfile=str(chain),
            ssl_keyfile=str(key), ssl_ca_certs=str(certified.authority.ca), ssl_cert_reqs=ssl.CERT_REQUIRED,
            **lifecycle,
        )  # fmt: skip
        server = Server(config)
        with socket.create_server((HOME, 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            try:
                yield f"{HOME}:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving


async def asked(
    address: str, browser: ssl.SSLContext, path: str = "/v1/models", **headers: str
) -> tuple[int, dict[str, Any]]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(verify=browser) as http:
        answer = await http.get(f"https://{address}{path}", headers=sent)
    return answer.status_code, answer.json()


async def until_known(address: str, browser: ssl.SSLContext, *, is_known: bool = True) -> None:
    """Routers look at the file each second, and gateways remember for two."""
    for _ in range(600):
        if ((await asked(address, browser))[0] == 401) != is_known:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the file was not taken up")


@pytest.mark.parametrize("who", [who for who, roles in WHO.items() if roles])
async def test_every_route_lets_in_the_certificates_that_the_table_says(certified: Certified, who: str) -> None:
    identity = Identity(who, "acme", frozenset(WHO[who]), 0)
    browser = certified.browser("client", f"spiffe://acme/{who}")
    async with gateway(certified) as address, httpx.AsyncClient(verify=browser) as http:
        for path, need in {**HTTP_NEEDS, "/reset_prefix_cache": Need.OPERATE, "/": Need.OPERATE}.items():
            if need is Need.NOTHING:
                continue
            certified.keyed.cluster.calls += path == "/v1/completions" and identity.may(need)
            answer = await http.get(f"https://{address}{path.replace('{id}', 'resp_none')}")
            assert answer.status_code == (200 if identity.may(need) else 403), (path, answer.text)
            if identity.may(need):
                assert answer.json() == {"who": f"by-{who}", "tenant": "acme"}


@pytest.mark.parametrize(
    ("name", "hosts", "entry"),
    [
        ("one", ("spiffe://zeta/chat",), "uri:spiffe://zeta/chat"),
        ("one", ("chat.zeta.example",), "dns:chat.zeta.example"),
        ("chat-of-zeta", ("else.example",), "cn:chat-of-zeta"),
    ],
)
async def test_a_name_of_each_kind_is_whom_its_entry_says(
    certified: Certified, name: str, hosts: tuple[str, ...], entry: str
) -> None:
    certified.know("zeta", entry, tenant="zeta")
    browser = certified.browser(name, *hosts)
    async with gateway(certified) as address:
        await until_known(address, browser)
        certified.keyed.cluster.calls += 2
        assert await asked(address, browser, "/v1/completions") == (200, {"who": "zeta", "tenant": "zeta"})
        await asked(address, certified.browser("client", "spiffe://acme/generate"), "/v1/completions")
        async with certified.client(name, *hosts) as client:
            assert await told(client) == "zeta", "as over gRPC"
            certified.keyed.cluster.calls += 1
            await client.generate("hello", max_tokens=4, temperature=0.0)
    salts = [job.cache_salt for job in named(certified.keyed.cluster, "prefill-0").engine.jobs]
    assert len(salts) == 3 and salts[0] == salts[2] != salts[1]


async def test_who_is_nobody_is_told_one_sentence_whatever_is_wrong(certified: Certified) -> None:
    certified.know("one", "uri:spiffe://acme/two-fold")
    certified.know("two", "cn:two-fold")
    certified.know("late", "uri:spiffe://acme/late", expires_s=1.0)
    strangers = [("client",), ("client", "spiffe://acme/al"), ("two-fold", "spiffe://acme/two-fold")]
    async with gateway(certified) as address:
        browsers = [certified.browser(*who) for who in (*strangers, ("client", "spiffe://acme/late"))]
        for browser in (*browsers, showing(certified.authority, certified.own_files)):
            assert await asked(address, browser) == (401, {"said": ONE_SENTENCE})


async def test_who_brings_a_key_is_judged_by_that_alone(certified: Certified) -> None:
    browser, key = certified.browser("client", "spiffe://acme/all"), certified.keyed.key["observe"]
    async with gateway(certified) as address:
        for brought in ({"authorization": f"Bearer {key}"}, {"x_api_key": key}):
            assert (await asked(address, browser, **brought))[1]["who"] == "observe"
            assert (await asked(address, browser, "/v1/completions", **brought))[0] == 403
        for wrong in ({"authorization": "Bearer rk-none"}, {"authorization": "Basic eA=="}, {"x_api_key": ""}):
            assert await asked(address, browser, **wrong) == (401, {"said": ONE_SENTENCE}), wrong
        assert (await asked(address, browser))[1]["who"] == "by-all"


async def test_connections_of_two_callers_are_not_mixed_up(certified: Certified) -> None:
    browsers = {who: certified.browser(who, f"spiffe://acme/{who}") for who in ("generate", "observe")}
    async with (
        gateway(certified) as address,
        httpx.AsyncClient(verify=browsers["generate"]) as one,
        httpx.AsyncClient(verify=browsers["observe"]) as other,
    ):
        url = f"https://{address}/v1/models"
        for _ in range(3):
            answers = await asyncio.gather(*(http.get(url) for http in (one, other, one)))
            assert [each.json()["who"] for each in answers] == ["by-generate", "by-observe", "by-generate"]


async def test_a_websocket_is_opened_by_a_certificate_and_ends_with_its_entry(certified: Certified) -> None:
    async with gateway(certified) as address:
        url = f"wss://{address}/v1/responses"
        for stranger, status in ((("client",), 401), (("client", "spiffe://acme/observe"), 403)):
            with pytest.raises(websockets.InvalidStatus) as raised:
                await websockets.connect(url, ssl=certified.browser(*stranger))
            assert raised.value.response.status_code == status
        browser = certified.browser("client", "spiffe://acme/generate")
        async with websockets.connect(url, ssl=browser) as talking:
            await talking.send("who")
            assert await talking.recv() == "by-generate"
            edit(certified.keyed.keys_file, lambda keys: keys.clear())
            await until_known(address, browser, is_known=False)
            await talking.send("who")
            assert await talking.recv() == "UNAUTHENTICATED"


async def test_certificates_of_others_late_ones_and_none_open_no_connection(
    certified: Certified, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other", "stranger")
    shown = (
        stranger.sign("client", "spiffe://acme/all"),
        certified.authority.sign("late", "spiffe://acme/all", days=-1.0),
        None,
    )
    async with gateway(certified) as address:
        for own in shown:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await asked(address, showing(certified.authority, own))


async def test_a_certificate_that_is_too_large_to_be_handed_on_is_nobodys(certified: Certified) -> None:
    browser = certified.browser(
        "client", "spiffe://acme/all", *(f"{number:03}.{'x' * 60}.example" for number in range(60))
    )
    async with gateway(certified) as address:
        status, answer = await asked(address, browser)
    assert status == 401 and answer["said"] == "certificates of more than 4096 bytes are not handed on"


# What a router takes from whom.


def certificate_of(files: tuple[Path, Path]) -> bytes:
    """DER."""
    return x509.load_pem_x509_certificate(files[0].read_bytes()).public_bytes(Encoding.DER)


async def who(certified: Certified, credentials: grpc.ChannelCredentials, metadata: Metadata) -> str:
    async with AsyncClient(certified.address, credentials=credentials, api_key="") as client:
        return await told(client.calling_with(metadata))


async def test_nobody_but_a_gateway_hands_certificates_on(certified: Certified) -> None:
    operator = certificate_of(certified.authority.sign("operator", "spiffe://acme/operate"))
    secret = read_secret(certified.keyed.keys_file.parent / "secret")
    forged = ((FORGED, operator),)
    nobody = f"UNAUTHENTICATED {ONE_SENTENCE}"
    client = certified.credentials("client", "spiffe://acme/generate")
    key = certified.keyed.key["observe"]
    assert await who(certified, certified.own, caller_metadata(secret, operator)) == "by-operate", "as a gateway does"
    # A client says so: it is who it was.
    assert await who(certified, client, forged) == "by-generate"
    assert await who(certified, client, (*forged, ("authorization", f"Bearer {key}"))) == "observe"
    for guess in (Secret(bytes(32)), Secret(b"")):
        assert await who(certified, client, caller_metadata(guess, operator)) == nobody
        assert await who(certified, certified.own, caller_metadata(guess, operator)) == nobody
    # A part of the service that is no gateway, as a worker, has the secret.
    refused = await who(certified, client, caller_metadata(secret, operator))
    assert refused.startswith("UNAUTHENTICATED certificates of callers are taken from gateways that show one")
    # And it hands on one alone, of a caller that there is.
    metadata = caller_metadata(secret, operator)
    assert await who(certified, certified.own, (*metadata, *forged)) == nobody
    for odd in (b"", b"\xff" * 100, operator[:-1]):
        assert await who(certified, certified.own, caller_metadata(secret, odd)) == nobody
    assert await who(certified, certified.own, caller_metadata(secret, certificate_of(certified.own_files))) == nobody


async def test_a_header_that_a_client_makes_up_reaches_no_router(certified: Certified) -> None:
    secret = read_secret(certified.keyed.keys_file.parent / "secret")
    operator = certificate_of(certified.authority.sign("operator", "spiffe://acme/operate"))
    made_up = {FORGED: operator.hex(), "rachis-service-key": secret.service_key, "x-client-certificate": operator.hex()}
    async with gateway(certified) as address, httpx.AsyncClient(verify=certified.browser("client")) as http:
        answer = await http.get(f"https://{address}/v1/models", headers=made_up)
    assert answer.status_code == 401


async def test_a_gateway_with_a_certificate_of_its_own_needs_a_name_of_the_routers(certified: Certified) -> None:
    browser = certified.browser("client", "spiffe://acme/generate")
    async with gateway(certified, certified.authority.sign("gateway", HOME, "gateway.example")) as address:
        status, answer = await asked(address, browser)
        by_key = await asked(address, browser, authorization=f"Bearer {certified.keyed.key['observe']}")
    assert status == 401 and answer["said"].startswith("certificates of callers are taken from gateways that show one")
    assert by_key[0] == 200, "callers with keys are served all the same"


def test_what_is_handed_on_says_nobody_to_a_router_that_does_not_know_it() -> None:
    """One of an earlier version would go by the certificate of the gateway, or by the key of the service."""
    metadata = caller_metadata(Secret(b"a" * 32), b"certificate")
    assert metadata[: len(NO_KEY)] == NO_KEY and [name for name, _ in metadata].count("authorization") == 1


@pytest.mark.parametrize(("clients", "trusted"), [(None, "ca.pem"), ("ca.pem", None), ("ca.pem", "other.pem")])
def test_a_front_with_other_authorities_than_routers_hands_nothing_on(clients: str | None, trusted: str | None) -> None:
    section = SecuritySection(certificate_file="tls.crt", certificate_key_file="tls.key", client_ca_file=clients)
    assert handing_on(Secret(b"a" * 32), section, trusted) is None


# The console, and metrics.


async def test_the_consoles_port_knows_certificates_and_needs_none(certified: Certified, tmp_path: Path) -> None:
    page = certified.keyed.cluster.router.metrics.address
    without = showing(certified.authority, None)

    async def called(browser: ssl.SSLContext, name: str, **headers: str) -> int:
        async with httpx.AsyncClient(verify=browser) as http:
            url, body = f"https://{page}/api/{name}", json.dumps({"worker_id": "decode-0"} if "Drain" in name else {})
            return (await http.post(url, content=body, headers={**CONSOLE, **headers})).status_code

    async def scraped(browser: ssl.SSLContext, path: str = "metrics", **headers: str) -> int:
        async with httpx.AsyncClient(verify=browser) as http:
            return (await http.get(f"https://{page}/{path}", headers=headers)).status_code

    observer, generator = (certified.browser(who, f"spiffe://acme/{who}") for who in ("observe", "generate"))
    bearer = {"authorization": f"Bearer {certified.keyed.key['generate']}"}
    statuses = {"observe": await called(observer, "GetPools"), "generate": await called(generator, "GetPools")}
    assert statuses == {"observe": 200, "generate": 403}
    assert await scraped(observer) == 200 and await scraped(generator) == 403
    assert await called(observer, "GetPools", **bearer) == 403 == await scraped(observer, **bearer), "the key alone"
    assert await called(observer, "GetPools", authorization="") == 401 == await scraped(observer, authorization="")
    for stranger in (without, certified.browser("client"), showing(certified.authority, certified.own_files)):
        assert await called(stranger, "GetPools") == 401 == await scraped(stranger)
        assert await scraped(stranger, "livez") == 200 == await scraped(stranger, "")
    assert await called(certified.browser("operator", "spiffe://acme/operate"), "DrainWorker") == 200
    assert [(line["key"], line["call"]) for line in certified.keyed.written()] == [("by-operate", "DrainWorker")]
    other = Authority(tmp_path / "other", "stranger").sign("client", "spiffe://acme/all")
    for own in (other, certified.authority.sign("late", "spiffe://acme/all", days=-1.0)):
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await called(showing(certified.authority, own), "GetPools")


async def test_another_sites_page_gets_nothing_by_the_certificate_that_a_browser_shows(certified: Certified) -> None:
    """A browser shows it whichever page asks."""
    page, browser = certified.keyed.cluster.router.metrics.address, certified.browser("client", "spiffe://acme/operate")
    async with httpx.AsyncClient(verify=browser) as http:
        url, body = f"https://{page}/api/DrainWorker", b'{"worker_id": "decode-0"}'
        for headers in (
            {**CONSOLE, "origin": "https://elsewhere.example"},
            {**CONSOLE, "sec-fetch-site": "cross-site"},
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
        ):
            assert (await http.post(url, content=body, headers=headers)).status_code == 403, headers
        assert (await http.options(url, headers={"origin": "https://elsewhere.example"})).status_code == 501
    assert not certified.keyed.audit_file.exists() or not certified.keyed.written()


async def test_the_public_door_knows_what_gateways_hand_on(certified: Certified) -> None:
    secret = read_secret(certified.keyed.keys_file.parent / "secret")
    caller = certificate_of(certified.authority.sign("client", "spiffe://acme/generate"))
    async with grpc.aio.secure_channel(certified.keyed.cluster.router.address, certified.own) as channel:
        answer = await router_pb2_grpc.RouterServiceStub(channel).GetIdentity(
            api.GetIdentityRequest(), metadata=tuple(caller_metadata(secret, caller)), timeout=30
        )
    assert answer.name == "by-generate"
