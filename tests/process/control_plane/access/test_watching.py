"""Who watches is told nothing more once another call of theirs would be refused; what has an end goes on to it."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import admin_pb2_grpc

from cluster_core.errors import OverloadedError
from cluster_wire.members import CallMetadata
from control_plane.access.access import KeyedAccess
from control_plane.access.api_keys import ApiKey
from control_plane.access.key_file import edit
from control_plane.access.roles import ENDLESS_RPCS, RPC_NEEDS, Identity, Role
from tests.fakes.cluster import until
from tests.planting import planted
from tests.process.control_plane.access.certified_world import certified_cluster
from tests.process.control_plane.access.conftest import Keyed, Metadata, method_of

_TIMEOUT_S = 60.0
Change = Callable[[ApiKey], Iterable[ApiKey]]
# What becomes of the entry of who watches, and what they are told.
CHANGES: dict[str, tuple[Change, grpc.StatusCode]] = {
    "revoked": (lambda key: (), grpc.StatusCode.UNAUTHENTICATED),
    "another secret": (lambda key: (replace(key, secrets=()),), grpc.StatusCode.UNAUTHENTICATED),
    "expired": (lambda key: (replace(key, expires_s=1.0),), grpc.StatusCode.UNAUTHENTICATED),
    "without the role": (
        lambda key: (replace(key, roles=frozenset({Role.GENERATE})),),
        grpc.StatusCode.PERMISSION_DENIED,
    ),
}


def changed(world: Keyed, name: str, change: Change) -> None:
    def edited(keys: dict[str, ApiKey]) -> None:
        entry = next(each for each in keys.values() if each.name == name)
        del keys[entry.key_id]
        keys.update({each.key_id: each for each in change(entry)})

    edit(world.keys_file, edited)


async def how_it_ends(
    api: "admin_pb2_grpc.AdminServiceAsyncStub", metadata: Metadata, meanwhile: Callable[[], None]
) -> grpc.StatusCode:
    """Of a call that is told something before, and after other callers' entries were changed."""
    call = api.WatchOverview(admin.WatchOverviewRequest(), metadata=metadata)
    async with asyncio.timeout(_TIMEOUT_S):
        for _ in range(2):
            assert (await anext(aiter(call))).HasField("overview")
        meanwhile()
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as ended:
            return ended.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("what", CHANGES)
async def test_a_key_that_is_no_longer_good_watches_no_longer(keyed: Keyed, what: str) -> None:
    change, expected = CHANGES[what]
    other = keyed.cluster.admin.WatchOverview(admin.WatchOverviewRequest(), metadata=keyed.metadata("all"))
    ended = await how_it_ends(keyed.cluster.admin, keyed.metadata("observe"), lambda: changed(keyed, "observe", change))
    assert ended is expected
    for _ in range(3):
        assert (await anext(aiter(other))).HasField("overview"), "others go on"
    other.cancel()


async def test_who_cannot_be_told_apart_for_now_is_told_the_next_thing_once_they_can(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where so many tokens of nobody come that none is looked at."""
    watch = keyed.cluster.admin.WatchOverview(admin.WatchOverviewRequest(), metadata=keyed.metadata("observe"))
    told = aiter(watch)
    assert (await anext(told)).HasField("overview")
    login, refused = KeyedAccess.login, 0

    async def busy(self: KeyedAccess, metadata: CallMetadata) -> Identity:
        nonlocal refused
        refused += 1
        if refused <= 2:
            raise OverloadedError("too many tokens are looked at", retry_after_ms=1)
        return await login(self, metadata)

    planted(monkeypatch, KeyedAccess, "login", busy)
    async with asyncio.timeout(_TIMEOUT_S):
        assert (await anext(told)).HasField("overview")
    assert refused == 3
    watch.cancel()


async def test_a_certificate_that_is_nobodys_any_more_watches_no_longer(
    tmp_path: Path, made: tuple[Path, dict[str, str]]
) -> None:
    async with certified_cluster(tmp_path, made) as world, world.client("watcher", "spiffe://acme/observe") as client:
        forget = lambda: changed(world.keyed, "by-observe", CHANGES["revoked"][0])  # noqa: E731
        assert await how_it_ends(client.admin, (), forget) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_generation_that_runs_when_its_key_is_revoked_goes_on_to_its_end(keyed: Keyed) -> None:
    for worker in keyed.cluster.workers:
        worker.engine.hold_before(2)
    running = asyncio.create_task(keyed.generate("generate"))
    await until(lambda: keyed.cluster.parts.admission.in_flight > 0)
    changed(keyed, "generate", CHANGES["revoked"][0])
    await until(lambda: not keyed.knows("generate"))
    for worker in keyed.cluster.workers:
        worker.engine.resume()
    assert (await running).usage.completion_tokens == 4


def test_every_call_without_an_end_is_in_the_table() -> None:
    """The others that tell end by themselves: with a prompt's answer, or with what was to be changed."""
    streams = {
        path
        for path in RPC_NEEDS
        if path.startswith("/rachis.") and method_of(path).server_streaming and not method_of(path).client_streaming
    }
    with_an_end = {"Generate", "Resume", "ScalePools", "RemoveWorker", "RestartWorkers"}
    assert {path for path in streams if path.rpartition("/")[2] not in with_an_end} == ENDLESS_RPCS
