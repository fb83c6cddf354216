"""A router with a certificate: who gets through its handshake, and certificates that change under it."""

import os
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from rachis import AsyncClient, Client, tls
from rachis.errors import InvalidInputError, UnavailableError

from benchmarks.certificates import Authority
from cluster_configs.schema import SecuritySection
from cluster_core import versions
from cluster_core.errors import ConfigError
from command_line.doctor import surroundings
from command_line.doctor.seen import Part, Seen
from control_plane.access.certificates import grpc_credentials
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster

HOME = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "stranger")


@asynccontextmanager
async def router(chain: Path, key: Path, **more: Any) -> AsyncIterator[Cluster]:
    flags = {"security__certificate_file": str(chain), "security__certificate_key_file": str(key), **more}
    async with running_cluster(**flags) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        yield cluster


def trusting(authority: Authority, own: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    chain, key = (own[0].read_bytes(), own[1].read_bytes()) if own is not None else (None, None)
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), key, chain)


async def asked(address: str, credentials: grpc.ChannelCredentials | None, server_name: str = "") -> str:
    """Who one is, over a connection of its own; or how it ended."""
    channel = AsyncClient(address, credentials=credentials, server_name=server_name)
    async with channel as client:
        try:
            return (await client.identity(5.0)).name
        except UnavailableError:
            return "no connection"


async def test_a_client_that_trusts_its_authority_is_served_and_no_other(
    authority: Authority, stranger: Authority
) -> None:
    async with router(*authority.sign("router", HOME)) as cluster:
        address = cluster.router.address
        assert await asked(address, trusting(authority)) == "anybody"
        assert await asked(address, trusting(stranger)) == "no connection"
        assert await asked(address, None) == "no connection", "there is no way down to plain text"
        async with AsyncClient(address, credentials=trusting(authority)) as client:
            cluster.calls += 2
            whole = await client.generate("hello", max_tokens=4, temperature=0.0)
            async with client.session(max_tokens=4, temperature=0.0) as session:
                assert whole.token_ids == [
                    token async for piece in session.finish("hello") for token in piece.token_ids
                ]


async def test_a_certificate_of_another_name_needs_that_name(authority: Authority) -> None:
    async with router(*authority.sign("router.example")) as cluster:
        assert await asked(cluster.router.address, trusting(authority)) == "no connection"
        assert await asked(cluster.router.address, trusting(authority), "router.example") == "anybody"


async def test_where_clients_need_a_certificate_one_of_another_authority_is_none(
    authority: Authority, stranger: Authority
) -> None:
    chain, key = authority.sign("router", HOME)
    async with router(chain, key, security__client_ca_file=str(authority.ca)) as cluster:
        address = cluster.router.address
        assert await asked(address, trusting(authority, authority.sign("somebody"))) == "anybody"
        assert await asked(address, trusting(authority)) == "no connection"
        assert await asked(address, trusting(authority, stranger.sign("somebody"))) == "no connection"
        assert await asked(address, trusting(authority, authority.sign("late", days=-1.0))) == "no connection"


def kept_in(folder: Path) -> tuple[Callable[[tuple[Path, Path]], None], Path, Path]:
    """What puts a certificate and its key in the place of others, each at once; and where they are."""
    kept = folder / "tls.crt", folder / "tls.key"

    def put(pair: tuple[Path, Path]) -> None:
        for source, target in zip(pair, kept, strict=True):
            made = target.with_suffix(".new")
            shutil.copy(source, made)
            made.replace(target)

    return put, *kept


def with_password(key: Path) -> bytes:
    password = BestAvailableEncryption(b"secret")
    return load_pem_private_key(key.read_bytes(), None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, password)


async def test_a_certificate_that_is_replaced_is_taken_up_and_a_broken_one_is_not(
    authority: Authority, stranger: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put, chain, key = kept_in(tmp_path)
    put(authority.sign("first", HOME))
    async with router(chain, key) as cluster:
        address = cluster.router.address
        async with AsyncClient(address, credentials=trusting(authority)) as client:
            assert (await client.identity(5.0)).name == "anybody"
            put(stranger.sign("second", HOME))
            assert await asked(address, trusting(stranger)) == "anybody"
            assert await asked(address, trusting(authority)) == "no connection"
            assert (await client.identity(5.0)).name == "anybody", "connections that are open go on"
        chain.write_text("no certificate")
        for _ in range(2):
            assert await asked(address, trusting(stranger)) == "anybody"
        assert caplog.text.count("the certificate stays as it is") == 1
        put(authority.sign("third", HOME))
        assert await asked(address, trusting(authority)) == "anybody"


def test_files_that_do_not_go_together_are_refused_at_the_start(authority: Authority, tmp_path: Path) -> None:
    (chain, _), (_, other_key) = authority.sign("one"), authority.sign("two")
    bad, locked = tmp_path / "bad", tmp_path / "locked"
    locked.write_bytes(with_password(other_key))
    bad.write_text("no PEM")
    for certificate, key, sentence in (
        (chain, other_key, "the key is not that of the certificate"),
        (bad, other_key, "do not go together"),
        (chain, bad, "do not go together"),
        (chain, locked, "[Pp]assword"),
        (tmp_path / "none", other_key, "none cannot be read: No such file"),
    ):
        section = SecuritySection(certificate_file=str(certificate), certificate_key_file=str(key))
        with pytest.raises(ConfigError, match=sentence):
            grpc_credentials(section)


async def test_the_environment_says_what_a_client_trusts(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    own = authority.sign("me")
    chain, key = authority.sign("router.example")
    async with router(chain, key, security__client_ca_file=str(authority.ca)) as cluster:
        for variable, value in (
            (tls.CA_VARIABLE, authority.ca), (tls.CERTIFICATE_VARIABLE, own[0]), (tls.KEY_VARIABLE, own[1]),
            (tls.SERVER_NAME_VARIABLE, "router.example"),
        ):  # fmt: skip
            monkeypatch.setenv(variable, str(value))
        assert await asked(cluster.router.address, None) == "anybody"


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({tls.CA_VARIABLE: "/no/such/file"}, tls.CA_VARIABLE),
        ({tls.CA_VARIABLE: tls.SYSTEM, tls.CERTIFICATE_VARIABLE: "/no/such/file"}, tls.CERTIFICATE_VARIABLE),
        ({tls.CERTIFICATE_VARIABLE: "/some/file"}, tls.CERTIFICATE_VARIABLE),
        ({tls.SERVER_NAME_VARIABLE: "router.example"}, tls.SERVER_NAME_VARIABLE),
    ],
)
def test_an_environment_that_is_wrong_is_named(environment: Mapping[str, str], field: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        tls.credentials_of(environment)
    assert raised.value.field == field


def test_the_sync_client_takes_them_too(authority: Authority) -> None:
    assert tls.CA_VARIABLE not in os.environ
    with Client("127.0.0.1:1", credentials=trusting(authority), server_name="x", api_key="rk-none") as client:
        assert not client.is_serving(0.2)


async def test_metrics_probes_and_the_console_are_encrypted_where_that_is_wanted(
    authority: Authority, stranger: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put, chain, key = kept_in(tmp_path)
    put(authority.sign("router", HOME))
    # A certificate of a client is for the doors of gRPC: a probe has none.
    flags = {"security__metrics_tls": True, "security__client_ca_file": str(authority.ca)}
    async with router(chain, key, **flags) as cluster:
        page = cluster.router.metrics
        assert page.url == f"https://{page.address}/metrics"
        for path, said in (("livez", "the router answers"), ("metrics", "rachis_requests"), ("", "<!doctype html>")):
            assert said in await page_of(f"https://{page.address}/{path}", authority)
        assert "workers" in await first_event_of(f"https://{page.address}/api/WatchOverview", authority)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await page_of(page.url, stranger)
        with pytest.raises(httpx.RemoteProtocolError):
            await page_of(page.url.replace("https", "http"), authority)
        put(stranger.sign("router", HOME))
        assert "rachis_requests" in await page_of(page.url, stranger)
        # A key that cannot be read without its password does not end who serves.
        key.write_bytes(with_password(key))
        assert "rachis_requests" in await page_of(page.url, stranger)
        assert caplog.text.count("the certificate stays as it is") == 1


async def first_event_of(url: str, trusted: Authority) -> str:
    async with (
        httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(trusted.ca))) as http,
        http.stream("POST", url, json={}) as answer,
    ):
        return await anext(line async for line in answer.aiter_lines() if line.startswith("data: "))


async def page_of(url: str, trusted: Authority) -> str:
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(trusted.ca))) as http:
        answer = await http.get(url)
    assert answer.status_code == 200
    return answer.text


def test_metrics_are_not_encrypted_without_a_certificate() -> None:
    with pytest.raises(ValueError, match="metrics_tls needs certificate_file"):
        SecuritySection(metrics_tls=True)


async def test_the_doctor_reads_metrics_that_are_encrypted(authority: Authority) -> None:
    async with router(*authority.sign("router", HOME), security__metrics_tls=True) as cluster:
        address = cluster.router.address
        async with AsyncClient(address, credentials=trusting(authority)) as client:
            status = await client.router_status()
        seen = await surroundings.added(
            address, Seen(now_unix_s=0.0, here=versions.installed(), router=status, workers=())
        )
        assert Part.METRICS not in seen.missing and seen.metrics
