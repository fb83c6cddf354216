"""A router whose administration has an address of its own: every method at each door, by every role and by nobody."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_reflection.v1alpha import reflection_pb2
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin

from control_plane.access.doors import DoorKind, doors_of
from control_plane.access.roles import RPC_NEEDS, Identity
from tests.fakes.cluster import running_cluster
from tests.process.control_plane.access.conftest import (
    REFUSED,
    WHO,
    Code,
    Keyed,
    Metadata,
    ended,
    keyed_cluster,
    status_of,
)

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DRAIN = "/rachis.v1.AdminService/DrainWorker"


@pytest_asyncio.fixture
async def apart(tmp_path: Path, made: tuple[Path, dict[str, str]]) -> AsyncIterator[Keyed]:
    async with keyed_cluster(tmp_path, made, router__admin_port=0, security__metrics_need_key=True) as world:
        yield world


def channels(keyed: Keyed) -> dict[DoorKind, grpc.aio.Channel]:
    return {DoorKind.PUBLIC: keyed.cluster.channel, DoorKind.ADMINISTRATION: keyed.cluster.admin_channel}


@pytest.mark.parametrize("who", WHO)
async def test_each_door_answers_its_methods_for_whom_the_table_says(apart: Keyed, who: str) -> None:
    identity = Identity(who, "acme", frozenset(WHO[who]), 0)
    for path, need in RPC_NEEDS.items():
        if not path.startswith("/rachis."):
            continue
        for door, channel in channels(apart).items():
            found, told = await ended(channel, path, apart.metadata(who))
            if path.endswith(("/Generate", "/Resume", "/StreamGenerate")) and found not in REFUSED:
                apart.cluster.calls += 1
            if who == "nobody":
                expected = {Code.UNAUTHENTICATED}
            elif not identity.may(need):
                expected = {Code.PERMISSION_DENIED}
            else:
                # Pools cannot be changed here at all, which is UNIMPLEMENTED, too.
                expected = {Code.UNIMPLEMENTED} if door not in doors_of(path) else set(Code) - REFUSED
                assert ("router.admin_port" in told) == (door not in doors_of(path)), (door, path, told)
            assert found in expected, (door, path, found)


async def test_a_client_is_told_at_the_door_of_prompts_where_administration_is(apart: Keyed) -> None:
    async with AsyncClient(apart.cluster.router.address, api_key=apart.key["observe"]) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=r"router\.admin_host and router\.admin_port") as raised:
            await client.workers()
        assert raised.value.code() is Code.UNIMPLEMENTED
    async with AsyncClient(apart.cluster.router.admin_address, api_key=apart.key["observe"]) as client:
        assert len(await client.workers()) == 2


async def test_a_method_that_there_is_not_is_none_of_either_door(apart: Keyed) -> None:
    for channel in channels(apart).values():
        call: Any = channel.unary_unary("/rachis.v1.AdminService/Erase", None, None)
        refused = await apart.refused(call(b"", metadata=apart.metadata("all")))
        assert refused.code() is Code.UNIMPLEMENTED and "admin_port" not in (refused.details() or "")


async def test_prompts_are_answered_at_both_doors_and_probes_too(apart: Keyed) -> None:
    for channel in channels(apart).values():
        assert await channel.unary_unary("/grpc.health.v1.Health/Check", None, None)(b"") == b"\x08\x01"
    for address in (apart.cluster.router.address, apart.cluster.router.admin_address):
        apart.cluster.calls += 1
        async with AsyncClient(address, api_key=apart.key["generate"]) as client:
            assert len((await client.generate("hello", max_tokens=4, temperature=0.0)).token_ids) == 4


async def _reflected(channel: grpc.aio.Channel, metadata: Metadata, **asked: str) -> Any:
    reflect: Any = channel.stream_stream(
        REFLECTION,
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = reflect(metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(**asked))
    await call.done_writing()
    (answer,) = [answer async for answer in call]
    return answer


async def test_reflection_tells_of_what_its_door_answers(apart: Keyed) -> None:
    metadata = apart.metadata("nothing")
    for door, channel in channels(apart).items():
        listed = await _reflected(channel, metadata, list_services="*")
        names = {service.name for service in listed.list_services_response.service}
        answered = {path.split("/")[1] for path in RPC_NEEDS if door in doors_of(path)}
        assert names == answered
        described = await _reflected(channel, metadata, file_containing_symbol="rachis.v1.AdminService")
        is_described = bool(described.file_descriptor_response.file_descriptor_proto)
        assert is_described == (door is DoorKind.ADMINISTRATION)
        described = await _reflected(channel, metadata, file_containing_symbol="rachis.v1.RouterService")
        assert described.file_descriptor_response.file_descriptor_proto


async def test_what_is_tried_at_the_wrong_door_is_written_down(apart: Keyed) -> None:
    await status_of(apart.cluster.channel, DRAIN, apart.metadata("operate"))
    await status_of(apart.cluster.channel, DRAIN, apart.metadata("generate"))
    found = [(line["key"], line["call"], line["status"]) for line in apart.written()]
    assert found == [("operate", "DrainWorker", "UNIMPLEMENTED"), ("generate", "DrainWorker", "PERMISSION_DENIED")]


async def _read(url: str, key: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})

    def read() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    return await asyncio.to_thread(read)


@pytest.mark.parametrize("who", WHO)
async def test_metrics_ask_for_a_key_where_they_are_told_to_and_probes_never(apart: Keyed, who: str) -> None:
    page = f"http://{apart.cluster.router.metrics.address}"
    status, said = await _read(f"{page}/metrics", apart.key[who])
    expected = 401 if who == "nobody" else 200 if who in ("observe", "operate", "all") else 403
    assert status == expected
    assert ("rachis_requests_total" in said) == (expected == 200)
    if who == "nobody":
        assert said == "a valid API key is needed: `authorization: Bearer rk-…`\n"
    for probe in ("/livez", "/readyz"):
        assert (await _read(f"{page}{probe}", apart.key[who]))[0] == 200


async def test_the_console_administers_while_its_door_is_apart(apart: Keyed) -> None:
    request = urllib.request.Request(
        f"http://{apart.cluster.router.metrics.address}/api/DrainWorker",
        data=json.dumps({"worker_id": "decode-0"}).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {apart.key['operate']}"},
    )

    def call() -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))

    assert await asyncio.to_thread(call) == {"state": "WORKER_STATE_DRAINING"}


async def test_without_keys_administration_is_apart_all_the_same() -> None:
    async with running_cluster(router__admin_port=0) as cluster:
        assert cluster.router.address != cluster.router.admin_address
        assert await status_of(cluster.channel, "/rachis.v1.AdminService/GetPools", ()) is Code.UNIMPLEMENTED
        told = await cluster.admin.GetRouterStatus(admin.GetRouterStatusRequest())
        assert told.service_id


async def test_by_default_one_door_on_loopback_answers_everything() -> None:
    async with running_cluster() as cluster:
        assert cluster.router.address == cluster.router.admin_address
        assert await status_of(cluster.channel, "/rachis.v1.AdminService/GetRouterStatus", ()) is Code.OK
