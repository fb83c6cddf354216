"""A router that asks for certificates and knows callers by them, and clients that show some."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from rachis import AsyncClient
from rachis.errors import RachisError

from benchmarks.certificates import Authority
from control_plane.access.api_keys import new_certificate
from control_plane.access.key_file import edit
from control_plane.access.roles import Role
from tests.process.control_plane.access.conftest import WHO, Keyed, keyed_cluster

HOME = "127.0.0.1"
# How often one caller asks. gRPC gives a handshake 20 s, and refuses at once for a second or more after one that fails.
_ASKS = 20
_PAUSE_S = 1.0
ONE_SENTENCE = "a valid API key is needed: `authorization: Bearer rk-…`"


class Certified:
    """keyed: of a router that asks for certificates. authority: that it trusts. own_files: the router's certificate and
    key."""

    def __init__(self, keyed: Keyed, authority: Authority, own_files: tuple[Path, Path]) -> None:
        self.keyed = keyed
        self.authority = authority
        # Of administration, which answers prompts too.
        self.address = keyed.cluster.router.admin_address
        self.own_files = own_files
        self.own = self._showing(*own_files)

    def credentials(self, name: str, *hosts: str) -> grpc.ChannelCredentials:
        return self._showing(*self.authority.sign(name, *hosts))

    def _showing(self, chain: Path, key: Path) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority.ca.read_bytes(), key.read_bytes(), chain.read_bytes())

    def browser(self, name: str, *hosts: str) -> ssl.SSLContext:
        """Of who shows such a certificate over HTTP."""
        return showing(self.authority, self.authority.sign(name, *hosts))

    def client(self, name: str, *hosts: str, api_key: str = "") -> AsyncClient:
        return AsyncClient(self.address, credentials=self.credentials(name, *hosts), api_key=api_key)

    def know(
        self, name: str, certificate: str, *roles: Role, tenant: str = "acme", expires_s: float | None = None
    ) -> None:
        key = new_certificate(
            name, tenant, roles or [Role.GENERATE], certificate, lowest_priority=-3, now_s=0.0, expires_s=expires_s
        )
        edit(self.keyed.keys_file, lambda keys: keys.update({key.key_id: key}))


def showing(trusted: Authority, own: tuple[Path, Path] | None) -> ssl.SSLContext:
    """Of an HTTP client."""
    context = ssl.create_default_context(cafile=str(trusted.ca))
    if own is not None:
        context.load_cert_chain(*own)
    return context


async def told(client: AsyncClient, timeout_s: float = 10.0) -> str:
    """Who one is, or what one is told instead."""
    try:
        return (await client.identity(timeout_s)).name
    except RachisError as refused:
        return f"{refused.status} {refused}"


async def answered(client: AsyncClient, timeout_s: float = 10.0) -> str:
    """What the router says. On a busy machine gRPC may give a handshake up, of its own bound: then one asks again."""
    for _ in range(_ASKS - 1):
        if not (found := await told(client, timeout_s)).startswith("UNAVAILABLE"):
            return found
        await asyncio.sleep(_PAUSE_S)
    return await told(client, timeout_s)


@asynccontextmanager
async def certified_cluster(tmp_path: Path, made: tuple[Path, dict[str, str]], **more: Any) -> AsyncIterator[Certified]:
    """made: a folder with keys, and who has which. more: settings beside those of certificates."""
    authority = Authority(tmp_path / "ca")
    chain, key = authority.sign("router", HOME)
    flags = {
        "security__certificate_file": str(chain),
        "security__certificate_key_file": str(key),
        "security__client_ca_file": str(authority.ca),
        "router__admin_port": 0,
        **more,
    }
    async with keyed_cluster(tmp_path, made, **flags) as keyed:
        world = Certified(keyed, authority, (chain, key))
        for who, roles in WHO.items():
            if roles:
                world.know(f"by-{who}", f"uri:spiffe://acme/{who}", *roles)
        world.know("router", "cn:router", *Role)
        async with world.client("first", "spiffe://acme/all") as client:
            await until_known(client)
        yield world


async def until_known(client: AsyncClient, *, is_known: bool = True) -> None:
    """The file is looked at each second."""
    for _ in range(600):
        if (await answered(client)).startswith("UNAUTHENTICATED") != is_known:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the file was not taken up")
