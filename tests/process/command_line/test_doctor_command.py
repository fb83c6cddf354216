"""`rachis doctor` on a whole service: nothing where it is well, and each planted misconfiguration by its name."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rachis import tls
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from benchmarks.certificates import Authority
from cluster_configs.loading import load
from cluster_core.background import BackgroundTasks
from cluster_core.ports import hold_port
from command_line.doctor.doctor_run import doctor
from control_plane.server.composition import RouterTiming
from kv_transfer.claims.claims import ClaimChange
from tests.fakes.cluster import DECODE, PREFILL, SERVICE, Cluster, Worker, named, running_cluster, until
from tests.fakes.indexed_cluster import CHUNK, index_of
from worker_runtime.claim_feed import ClaimFeed

# What is not there beside engines that are none and a router alone.
NOT_THERE: dict[str, Any] = {
    "redis__refresh_s": 0.02,
    "index__chunk_tokens": CHUNK,
    "tiers__host_gib": 0.0,
    "gateway__port": None,
}
INDEX = load(flags={"index.chunk_tokens": CHUNK}).config.index
TIMING = RouterTiming(check_settle_s=0.05, check_between_s=0.001)
Planting = Callable[["World"], contextlib.AbstractAsyncContextManager[None]]


class World:
    """Two workers of each pool, with an index that follows them through Redis."""

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster = cluster
        self.patch = patch
        self._capsys = capsys

    async def told(self) -> dict[str, Any]:
        """What the doctor says; its exit code says the same."""
        code = await doctor(self.cluster.router.admin_address, as_json=True)
        result: dict[str, Any] = json.loads(self._capsys.readouterr().out.splitlines()[-1])
        # Its own requests; they have ended, as it has looked at the workers since.
        self.cluster.calls = sum(self.cluster.outcomes.values())
        assert code == (1 if result["findings"] else 0)
        return result

    async def found(self) -> set[tuple[str, str]]:
        return {(finding["check"], finding["subject"]) for finding in (await self.told())["findings"]}

    def engines(self, *names: str) -> list[Any]:
        return [named(self.cluster, name).engine for name in names]

    async def registers(self, name: str, **fields: Any) -> None:
        """The worker's registration has these fields, and the router knows."""
        record = named(self.cluster, name).record
        for field, value in fields.items():
            setattr(record, field, value)
        await self.cluster.register(record)
        await until(lambda: all(getattr(self.known(name), field) == value for field, value in fields.items()))

    def known(self, name: str) -> Any:
        member = self.cluster.router.membership.get(name)
        return member.registration if member is not None else None


@contextlib.asynccontextmanager
async def world(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **flags: Any) -> AsyncIterator[World]:
    feeds = BackgroundTasks()
    async with running_cluster(timing=TIMING, **{**NOT_THERE, **flags}) as cluster:
        cluster.registry.is_whole = True
        for pool in (PREFILL, PREFILL, DECODE, DECODE):
            await _join(cluster, pool, feeds)
        await until(lambda: cluster.parts.queries.status().connected)
        yield World(cluster, patch, capsys)
        await feeds.cancel()


async def _join(cluster: Cluster, pool: Any, feeds: BackgroundTasks) -> Worker:
    number = sum(worker.record.pool == pool for worker in cluster.workers)
    name = f"{'prefill' if pool == PREFILL else 'decode'}-{number}"
    redis: Any = cluster.registry
    feed = ClaimFeed(redis, SERVICE, name, 1, INDEX)
    await feed.open()
    worker = await cluster.add(pool, name, claim_feed=feed, chunk_tokens=CHUNK, service_id=SERVICE)
    worker.engine.follow_claims(feed.changed)
    # As it would tell with its next renewal; here nobody renews.
    worker.record.cacheable_requests = 1
    await cluster.register(worker.record)
    feeds.start(feed.keep())
    return worker


@contextlib.asynccontextmanager
async def drained(world: World, *names: str) -> AsyncIterator[None]:
    async def until_it_is(state: wire.WorkerState.ValueType) -> None:
        await until(lambda: all(world.known(name).state == state for name in names))

    for name in names:
        await world.cluster.admin.DrainWorker(admin.DrainWorkerRequest(worker_id=name))
    await until_it_is(wire.WORKER_STATE_DRAINING)
    yield
    for name in names:
        await world.cluster.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id=name))
    await until_it_is(wire.WORKER_STATE_READY)


def a_drained_worker(world: World) -> contextlib.AbstractAsyncContextManager[None]:
    return drained(world, "decode-1")


def a_drained_pool(world: World) -> contextlib.AbstractAsyncContextManager[None]:
    return drained(world, "prefill-0", "prefill-1")


@contextlib.asynccontextmanager
async def a_wrong_clock(world: World) -> AsyncIterator[None]:
    await world.registers("decode-1", clock_ahead_ms=73_000)
    yield
    await world.registers("decode-1", clock_ahead_ms=0)


@contextlib.asynccontextmanager
async def a_redis_that_is_gone(world: World) -> AsyncIterator[None]:
    status, store = world.cluster.parts.overview.router, world.cluster.registry.store
    store.is_down = True
    await until(lambda: not status().registry_connected)
    yield
    store.is_down = False
    await until(lambda: status().registry_connected and world.cluster.parts.queries.status().connected)


@contextlib.asynccontextmanager
async def pulls_that_fail(world: World) -> AsyncIterator[None]:
    async def reads_nothing(*_: object) -> list[Any]:
        return []

    with world.patch.context() as patch:
        # The fabric between the engines, as when NIXL's transport does not work.
        patch.setattr(world.cluster.fabric, "read", reads_nothing)
        yield


@contextlib.asynccontextmanager
async def caches_that_do_not_hit(world: World) -> AsyncIterator[None]:
    with world.patch.context() as patch:
        for engine in world.engines("prefill-0", "prefill-1"):
            # An engine whose cache finds nothing is no setting of the stand-in.
            patch.setattr(engine.content, "cached", lambda run: [])
        yield


@contextlib.asynccontextmanager
async def an_engine_with_other_tokens(world: World) -> AsyncIterator[None]:
    with world.patch.context() as patch:
        for engine in world.engines("decode-0"):
            # An engine whose KV is wrong is no setting of the stand-in.
            patch.setattr(engine.content, "next_token", lambda run: ord("!"))
        yield


@contextlib.asynccontextmanager
async def an_index_that_is_wrong(world: World) -> AsyncIterator[None]:
    keys = np.array([1, 2, 3], dtype=np.uint64)
    index_of(world.cluster).apply("prefill-1", ClaimChange(device_stored=keys))
    yield
    index_of(world.cluster).apply("prefill-1", ClaimChange(device_removed=keys))


@contextlib.asynccontextmanager
async def a_poisoned_request(world: World) -> AsyncIterator[None]:
    with world.patch.context() as patch:
        # Two engines would have to die of it.
        patch.setattr(type(world.cluster.parts.dispatcher.poison), "poisoned", lambda self, now_s: 2)
        yield


@contextlib.asynccontextmanager
async def workers_of_two_models(world: World) -> AsyncIterator[None]:
    named(world.cluster, "decode-1").record.model.dtype = "bfloat16"
    await world.registers("decode-1")
    await until(lambda: world.known("decode-1").model.dtype == "bfloat16")
    yield
    named(world.cluster, "decode-1").record.model.dtype = "float32"
    await world.registers("decode-1")
    await until(lambda: world.known("decode-1").model.dtype == "float32")


PLANTED: dict[Planting, set[tuple[str, str]]] = {
    a_drained_worker: {("worker_drains", "decode-1")},
    a_drained_pool: {("prefill_pool", "prefill")},
    a_wrong_clock: {("clocks", "decode-1")},
    a_redis_that_is_gone: {("registry", "redis")},
    pulls_that_fail: {("handoff", "decode-0")},
    caches_that_do_not_hit: {("prefix_cache", "prefill-0")},
    an_engine_with_other_tokens: {("token_identity", "decode-1")},
    an_index_that_is_wrong: {("index_claims", "prefill-1")},
    a_poisoned_request: {("poison", "router")},
    workers_of_two_models: {("models", "workers")},
}


async def test_each_planted_misconfiguration_is_found_and_nothing_where_it_was_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(monkeypatch, capsys) as service:
        well = await service.told()
        assert well["findings"] == []
        assert {each["check"] for each in well["not_checked"]} == {"pool_size"}
        for planting, expected in PLANTED.items():
            async with planting(service):
                assert await service.found() == expected, planting.__name__
            assert await service.found() == set(), f"after {planting.__name__}"


async def test_what_is_wrong_at_once_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that are in vain, an open door, a worker of another version, and one that is gone."""
    flags = {
        "router__host": "0.0.0.0",
        "router__admin_port": 0,
        "security__open": True,
        "streaming__preemption": "swap",
        "lora__max_loaded": 1,
        "lora__adapters": ["tone=/nowhere"],
        "tracing__sample_rate": 0.5,
        "redis__refresh_s": 0.01,
    }
    async with world(monkeypatch, capsys, **flags) as service:
        cluster = service.cluster
        record = named(cluster, "decode-1").record
        record.versions.vllm = "0.31.0"
        await service.registers("decode-1", generation=2)
        await named(cluster, "prefill-1").crash()
        result = await service.told()
        assert {(finding["check"], finding["subject"]) for finding in result["findings"]} == {
            ("exposure", "router.host"),
            ("mechanisms", "streaming.preemption"),
            ("mechanisms", "tracing.sample_rate"),
            ("adapters", "tone"),
            ("worker_versions", "decode-1"),
            ("worker_lost", "prefill-1"),
        }
        await doctor(cluster.router.admin_address, as_json=False)
        cluster.calls = sum(cluster.outcomes.values())
        text = capsys.readouterr().out
        assert "decode-1 gets no requests: vLLM is 0.31.0" in text
        assert "docs/runbooks/RachisVersionSkew.md" in text


async def test_a_certificate_that_ends_soon_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    chain, key = authority.sign("router", "127.0.0.1", days=5)
    flags = {"security__certificate_file": str(chain), "security__certificate_key_file": str(key)}
    monkeypatch.setenv(tls.CA_VARIABLE, str(authority.ca))
    async with world(monkeypatch, capsys, **flags) as service:
        assert await service.found() == {("certificate", "security.certificate_file")}


async def test_hand_offs_are_tried_by_a_session_where_the_router_may_do_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"placement__disaggregation": "conditional", "placement__local_prefill_tokens": 1000}
    async with world(monkeypatch, capsys, **flags) as service:
        for name in ("decode-0", "decode-1"):
            # Pulls take longer than computing: prompts of this length are not handed off.
            named(service.cluster, name).record.costs.pull_s = 5.0
            await service.registers(name)
        await until(lambda: all(service.known(name).costs.pull_s for name in ("decode-0", "decode-1")))
        assert await service.found() == set()
        assert set(service.cluster.parts.queries.status().disaggregation) == {"short_remainder", "session"}
        async with pulls_that_fail(service):
            assert {check for check, _ in await service.found()} == {"handoff"}


async def test_a_router_that_cannot_be_asked_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{hold_port('127.0.0.1')}"
    assert await doctor(address, as_json=True) == 2
    told = capsys.readouterr()
    assert "UNAVAILABLE" in told.err and not told.out


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")
