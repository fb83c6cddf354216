"""A whole router with keys, over fake engines."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import message_factory
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_wire.secret import write_secret
from control_plane.access.access import KeyedAccess
from control_plane.access.api_keys import new_key
from control_plane.access.key_file import edit
from control_plane.access.roles import ENDLESS_RPCS, Role
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str], ...]
WHO = {"nobody": (), "nothing": (), **{role.value: (role,) for role in Role}, "all": tuple(Role)}
REFUSED = {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


class Keyed:
    """A cluster with keys. key: by who has it; `nobody` has none."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.keys_file = folder / "keys.json"
        self.audit_file = folder / "audit.jsonl"
        self.key: dict[str, str] = {"nobody": ""}

    def metadata(self, who: str) -> Metadata:
        return bearer(self.key[who]) if self.key[who] else ()

    def knows(self, who: str) -> bool:
        """Whether the router knows that key without looking at it."""
        access = self.cluster.parts.door.access
        assert isinstance(access, KeyedAccess)
        return access.known(self.metadata(who)) is not None

    async def generate(self, who: str, text: str = "hello there", **fields: Any) -> generation.Completion:
        request = api.GenerateRequest(
            prompt=generation.PromptInput(text=text),
            sampling=generation.SamplingParams(temperature=0.0, max_tokens=4),
            **fields,
        )
        self.cluster.calls += 1
        responses = self.cluster.api.Generate(request, metadata=self.metadata(who))
        return [response async for response in responses][-1].completion

    async def identity(self, who: str) -> api.GetIdentityResponse:
        return await self.cluster.api.GetIdentity(api.GetIdentityRequest(), metadata=self.metadata(who))

    async def refused(self, call: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        return raised.value

    def written(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


def method_of(path: str) -> Any:
    """The descriptor of a method of ours."""
    _, service, name = path.split("/")
    files = (api.DESCRIPTOR, admin.DESCRIPTOR)
    services = {each.full_name: each for file in files for each in file.services_by_name.values()}
    return services[service].methods_by_name[name]


async def status_of(channel: grpc.aio.Channel, path: str, metadata: Metadata) -> grpc.StatusCode:
    """How a call with an empty message ends, or that one of `ENDLESS_RPCS` has begun."""
    return (await ended(channel, path, metadata))[0]


async def ended(channel: grpc.aio.Channel, path: str, metadata: Metadata) -> tuple[grpc.StatusCode, str]:
    """Likewise, and what it is told."""
    method = method_of(path)
    parse = message_factory.GetMessageClass(method.output_type).FromString
    write, request = (lambda message: message.SerializeToString()), message_factory.GetMessageClass(method.input_type)()
    try:
        if method.client_streaming:
            streaming: Any = channel.stream_stream(path, write, parse)
            call = streaming(metadata=metadata, timeout=30)
            await call.done_writing()
            async for _ in call:
                pass
        elif method.server_streaming:
            call = channel.unary_stream(path, write, parse)(request, metadata=metadata, timeout=30)
            async for _ in call:
                if path in ENDLESS_RPCS:
                    call.cancel()
                    break
        else:
            await channel.unary_unary(path, write, parse)(request, metadata=metadata, timeout=30)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return Code.OK, ""


def add_key(path: Path, name: str, *roles: Role, tenant: str = "acme", lowest_priority: int = 0) -> str:
    """A role is needed: a key that has none is made by taking it away."""
    key, given = new_key(
        name, tenant, roles or [Role.GENERATE], lowest_priority=lowest_priority, now_s=0.0, expires_s=None
    )
    kept = replace(key, roles=frozenset(roles))
    edit(path, lambda keys: keys.update({kept.key_id: kept}))
    return given


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    return made_keys(tmp_path_factory.mktemp("keys"))


def made_keys(folder: Path) -> tuple[Path, dict[str, str]]:
    """A folder with a secret and a file of keys, and what their holders have: made once, since hashing takes long."""
    write_secret(folder / "secret")
    path = folder / "keys.json"
    given = {name: add_key(path, name, *roles) for name, roles in WHO.items() if name != "nobody"}
    given["ops"] = add_key(path, "ops", Role.OPERATE, Role.OBSERVE, tenant="zeta", lowest_priority=-7)
    given["peer"] = add_key(path, "peer", Role.GENERATE, Role.OBSERVE, tenant="zeta")
    given["looker"] = add_key(path, "looker", Role.GENERATE, Role.OBSERVE, tenant="acme")
    return folder, given


@asynccontextmanager
async def keyed_cluster(tmp_path: Path, made: tuple[Path, dict[str, str]], **more: Any) -> AsyncIterator[Keyed]:
    """more: settings beside those of the keys."""
    folder, given = made
    for name in ("secret", "keys.json"):
        shutil.copy(folder / name, tmp_path / name)
    path = tmp_path / "keys.json"
    flags = {
        "security__keys_file": str(path),
        "security__secret_file": str(tmp_path / "secret"),
        "security__audit_file": str(tmp_path / "audit.jsonl"),
    }
    async with running_cluster(**flags, index__chunk_tokens=32, **more) as cluster:  # type: ignore[arg-type]  # by name
        # A release that is late on a busy machine is left to the lease.
        await cluster.add(PREFILL, lease_s=60.0)
        await cluster.add(DECODE)
        world = Keyed(cluster, tmp_path)
        world.key.update(given)
        yield world


@pytest_asyncio.fixture
async def keyed(tmp_path: Path, made: tuple[Path, dict[str, str]]) -> AsyncIterator[Keyed]:
    async with keyed_cluster(tmp_path, made) as world:
        yield world
