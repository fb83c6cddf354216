"""A router that knows callers by the certificate that they show: whom it takes for whom, and for nobody."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from rachis import AsyncClient, tls
from rachis.errors import PermissionDeniedError, UnauthenticatedError
from rachis.metadata_channel import NO_KEY
from rachis.v1 import admin_pb2 as admin

from benchmarks.certificates import Authority
from cluster_configs.schema import SecuritySection
from control_plane.access.key_file import edit
from control_plane.access.roles import RPC_NEEDS, Identity
from control_plane.gateway.gateway import client_of_routers
from tests.fakes.cluster import named
from tests.process.control_plane.access.certified_world import (
    ONE_SENTENCE,
    Certified,
    certified_cluster,
    told,
    until_known,
)
from tests.process.control_plane.access.conftest import REFUSED, WHO, Code, status_of
from tests.process.control_plane.console.calls import called


@pytest_asyncio.fixture
async def certified(tmp_path: Path, made: tuple[Path, dict[str, str]]) -> AsyncIterator[Certified]:
    async with certified_cluster(tmp_path, made) as world:
        yield world


@pytest.mark.parametrize("who", [who for who, roles in WHO.items() if roles])
async def test_a_certificate_may_what_its_entry_may(certified: Certified, who: str) -> None:
    identity = Identity(who, "acme", frozenset(WHO[who]), 0)
    credentials = certified.credentials("client", f"spiffe://acme/{who}")
    async with grpc.aio.secure_channel(certified.address, credentials) as channel:
        for path, need in RPC_NEEDS.items():
            if not path.startswith("/rachis."):
                continue
            found = await status_of(channel, path, ())
            if path.endswith(("/Generate", "/Resume", "/StreamGenerate")) and found not in REFUSED:
                certified.keyed.cluster.calls += 1
            assert (found is Code.PERMISSION_DENIED) == (not identity.may(need)), (path, found)
            assert found is not Code.UNAUTHENTICATED, path


async def test_prompts_and_sessions_are_of_the_entrys_tenant(certified: Certified) -> None:
    certified.know("zeta", "dns:chat.zeta.example", tenant="zeta")
    async with certified.client("one", "chat.zeta.example") as zeta:
        await until_known(zeta)
        who = await zeta.identity(10.0)
        assert (who.name, who.tenant, list(who.roles), who.lowest_priority) == ("zeta", "zeta", ["generate"], -3)
        certified.keyed.cluster.calls += 2
        whole = await zeta.generate("hello", max_tokens=4, temperature=0.0, priority=-3)
        async with zeta.session(max_tokens=4, temperature=0.0) as session:
            assert whole.token_ids == [token async for piece in session.finish("hello") for token in piece.token_ids]
    async with certified.client("two", "spiffe://acme/generate") as acme:
        certified.keyed.cluster.calls += 1
        await acme.generate("hello", max_tokens=4, temperature=0.0)
    salts = [job.cache_salt for job in named(certified.keyed.cluster, "prefill-0").engine.jobs]
    assert salts[0] != salts[-1] and all(len(salt) == 64 for salt in salts)


async def test_who_is_nobody_is_told_one_sentence_whatever_is_wrong(certified: Certified) -> None:
    certified.know("one", "uri:spiffe://acme/two-fold")
    certified.know("two", "cn:two-fold")
    for stranger in (("client",), ("client", "spiffe://acme/al"), ("two-fold", "spiffe://acme/two-fold")):
        async with certified.client(*stranger) as client:
            assert await told(client) == f"UNAUTHENTICATED {ONE_SENTENCE}", stranger


async def test_the_services_own_certificate_is_nobodys_though_the_file_has_its_name(certified: Certified) -> None:
    async with AsyncClient(certified.address, credentials=certified.own, api_key="") as client:
        assert await told(client) == f"UNAUTHENTICATED {ONE_SENTENCE}"


async def test_who_brings_a_key_is_judged_by_that_alone(certified: Certified) -> None:
    async with certified.client("client", "spiffe://acme/all", api_key=certified.keyed.key["observe"]) as client:
        assert await told(client) == "observe"
        with pytest.raises(PermissionDeniedError):
            await client.generate("hello")
    async with certified.client("client", "spiffe://acme/all", api_key="rk-none") as client:
        assert await told(client) == f"UNAUTHENTICATED {ONE_SENTENCE}"
    async with certified.client("client", "spiffe://acme/all") as client:
        assert await told(client.calling_with(NO_KEY)) == f"UNAUTHENTICATED {ONE_SENTENCE}"


async def test_a_gateway_is_nobody_by_its_certificate(certified: Certified) -> None:
    """Whose callers have keys of their own."""
    chain, key = certified.authority.sign("gateway", "spiffe://acme/all")
    security = SecuritySection(
        certificate_file=str(chain), certificate_key_file=str(key), ca_file=str(certified.authority.ca)
    )
    async with client_of_routers(certified.address, security, "") as client:
        with pytest.raises(UnauthenticatedError):
            await client.models(10.0)


async def test_a_message_of_who_is_nobody_is_not_parsed(certified: Certified) -> None:
    """What is no message at all would be INVALID_ARGUMENT if somebody had looked at it."""

    async def ended(*hosts: str) -> grpc.StatusCode:
        async with grpc.aio.secure_channel(certified.address, certified.credentials("client", *hosts)) as channel:
            call: Any = channel.unary_unary("/rachis.v1.AdminService/DrainWorker", None, None)
            return (await certified.keyed.refused(call(b"\xff" * 1000))).code()

    assert await ended() is Code.UNAUTHENTICATED
    assert await ended("spiffe://acme/generate") is Code.PERMISSION_DENIED
    assert await ended("spiffe://acme/operate") is Code.INVALID_ARGUMENT


async def test_the_public_door_knows_certificates_too_and_does_not_administer(certified: Certified) -> None:
    async def ended(*hosts: str) -> grpc.StatusCode:
        credentials = certified.credentials("client", *hosts)
        async with grpc.aio.secure_channel(certified.keyed.cluster.router.address, credentials) as channel:
            assert (await status_of(channel, "/rachis.v1.RouterService/GetIdentity", ()) is Code.OK) == bool(hosts)
            return await status_of(channel, "/rachis.v1.AdminService/DrainWorker", ())

    assert await ended() is Code.UNAUTHENTICATED
    assert await ended("spiffe://acme/generate") is Code.PERMISSION_DENIED
    assert await ended("spiffe://acme/operate") is Code.UNIMPLEMENTED


async def test_the_console_needs_a_key_where_its_port_is_not_encrypted(certified: Certified) -> None:
    page = certified.keyed.cluster.router.metrics.address
    assert (await called(page, "GetPools")).status == 401
    assert (await called(page, "GetPools", key=certified.keyed.key["observe"])).status == 200


async def test_what_is_changed_is_written_down_with_the_entrys_name(certified: Certified) -> None:
    async with certified.client("client", "spiffe://acme/operate") as client:
        await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))
    async with certified.client("client", "spiffe://acme/generate") as client:
        with pytest.raises(grpc.aio.AioRpcError):
            await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))
    found = [(line["key"], line["request"], line["status"]) for line in certified.keyed.written()]
    assert found == [
        ("by-operate", {"worker_id": "decode-0"}, "OK"), ("by-generate", None, "PERMISSION_DENIED"),
    ]  # fmt: skip


async def test_an_entry_that_is_revoked_ends_on_connections_that_are_open(certified: Certified) -> None:
    async with certified.client("client", "spiffe://acme/observe") as client:
        assert await told(client) == "by-observe"
        edit(certified.keyed.keys_file, lambda keys: keys.clear())
        await until_known(client, is_known=False)
        assert await told(client) == f"UNAUTHENTICATED {ONE_SENTENCE}"


async def test_certificates_of_others_and_late_ones_open_no_connection(certified: Certified, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "other", "stranger")
    for chain, key in (
        stranger.sign("client", "spiffe://acme/all"),
        certified.authority.sign("late", "spiffe://acme/all", days=-1.0),
    ):
        trusted = certified.authority.ca.read_bytes()
        credentials = grpc.ssl_channel_credentials(trusted, key.read_bytes(), chain.read_bytes())
        async with AsyncClient(certified.address, credentials=credentials, api_key="") as client:
            assert (await told(client)).startswith("UNAVAILABLE")


async def test_a_command_shows_the_certificate_of_its_environment(
    certified: Certified, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = certified.authority.sign("client", "spiffe://acme/observe")
    for variable, value in (
        (tls.CA_VARIABLE, certified.authority.ca), (tls.CERTIFICATE_VARIABLE, chain), (tls.KEY_VARIABLE, key),
    ):  # fmt: skip
        monkeypatch.setenv(variable, str(value))
    async with AsyncClient(certified.address) as client:
        assert await told(client) == "by-observe"
        assert len(await client.workers()) == 2
