"""A service with keys, tenants and TLS, over real engines and a gateway; and who has which key."""

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import anthropic
import grpc
import httpx
import openai
import redis
from rachis import AsyncClient

from benchmarks.certificates import Authority
from cluster_core.ports import hold_port
from cluster_wire.secret import write_secret
from command_line.own_service import Target
from control_plane.access.api_keys import new_key
from control_plane.access.key_file import edit
from control_plane.access.roles import Role
from tests.fakes.redis_server import running_redis
from tests.integration.conftest import own_service, until

MODEL = "rachis-builtin"
# name: (tenant, roles). `nobody` has no key.
KEYS: dict[str, tuple[str, tuple[Role, ...]]] = {
    "acme": ("acme", (Role.GENERATE,)),
    "acme-too": ("acme", (Role.GENERATE,)),
    "zeta": ("zeta", (Role.GENERATE,)),
    "zeta-looks": ("zeta", (Role.OBSERVE,)),
    "ops": ("ops", (Role.OPERATE,)),
    "leaves": ("acme", (Role.GENERATE,)),
}
PROMPT = [(11 * place) % 250 for place in range(400)]
TEXT = "The quick brown fox of tenant acme jumps over a very lazy and confidential dog. " * 4


@dataclass
class World:
    """key: by who has it. service_id: of the service's names in Redis."""

    target: Target
    url: str
    key: dict[str, str]
    folder: Path
    redis: redis.Redis
    ca: Path
    service_id: str = ""

    def client(self, who: str) -> AsyncClient:
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return AsyncClient(self.target.address, credentials=credentials, api_key=self.key[who])

    def http(self, who: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key[who] or "none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=self.trusting),
        )

    def anthropic(self, key: str) -> anthropic.AsyncAnthropic:
        client = anthropic.DefaultAsyncHttpxClient(verify=self.trusting)
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0, http_client=client)

    def plain_http(self, who: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.key[who]}"} if self.key[who] else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, verify=self.trusting, timeout=300)

    def environment(self, who: str) -> Any:
        """Of a command."""
        return mock.patch.dict(os.environ, {"RACHIS_API_KEY": self.key[who], "RACHIS_CA_FILE": str(self.ca)})

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


@asynccontextmanager
async def keyed_service(folder: Path, redis_folder: Path) -> AsyncIterator[World]:
    write_secret(folder / "secret")
    given = {"nobody": ""}
    for name, (tenant, roles) in KEYS.items():
        key, given[name] = new_key(name, tenant, roles, lowest_priority=0, now_s=0.0, expires_s=None)
        edit(folder / "keys.json", lambda keys, key=key: keys.update({key.key_id: key}))  # type: ignore[misc]
    authority = Authority(folder)
    chain, key_of_chain = authority.sign("service", "127.0.0.1", "localhost")
    port = hold_port("127.0.0.1")
    with running_redis(redis_folder) as redis_url:
        flags = {
            "security__keys_file": str(folder / "keys.json"),
            "security__secret_file": str(folder / "secret"),
            "security__audit_file": str(folder / "audit.jsonl"),
            "security__certificate_file": str(chain),
            "security__certificate_key_file": str(key_of_chain),
            "security__ca_file": str(authority.ca),
            "gateway__port": port,
            "redis__url": redis_url,
            "index__chunk_tokens": 64,
        }
        async with own_service(folder / "state", **flags) as (target, _):
            made = World(target, f"https://127.0.0.1:{port}", given, folder, redis.from_url(redis_url), authority.ca)
            async with made.client("ops") as ops:
                made.service_id = (await ops.router_status()).service_id
            await until(lambda: _is_up(made), "the gateway is up")
            yield made
            made.redis.close()


async def _is_up(world: World) -> bool:
    async with world.plain_http("nobody") as http:
        try:
            return (await http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False
