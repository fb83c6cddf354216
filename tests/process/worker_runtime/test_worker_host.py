"""How a worker comes up and goes, on a real Redis and an engine that computes nothing."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_configs.schema import ModelSection, RachisConfig
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import StartError
from cluster_core.ids import registry_digest
from cluster_core.versions import Versions
from cluster_wire import registry
from prefill_worker.service import PrefillService
from tests.fakes.cluster import until
from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import running_redis
from worker_runtime import host as worker_host
from worker_runtime import own_node
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.host import WorkerHost, WorkerSettings
from worker_runtime.own_node import NODE, NodePlace
from worker_runtime.registration import Registration
from worker_runtime.worker_server import LIVENESS, WORKER_SERVICE

SERVICE, WORKER = "svc-test", "prefill-0"


class Engine(FakeEngine):
    stopped = False
    loop: asyncio.AbstractEventLoop

    async def start(self, *arguments: Any) -> EngineInfo:
        self.loop = asyncio.get_running_loop()
        return await super().start(*arguments)

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
async def client(server: str) -> AsyncIterator[Any]:
    client = redis.Redis.from_url(server)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def start(
    url: str,
    engine: Engine,
    place: NodePlace | None = None,
    retire: Callable[[], None] = lambda: None,
    **changes: Any,
) -> WorkerHost:
    """With settings changed, of the engine as `engine__host`."""
    config = RachisConfig()
    of_engine = {name.partition("__")[2]: value for name, value in changes.items() if name.startswith("engine__")}
    parts = replace(EngineSettings(config.model, config.engine, config.handoff, EngineRole.PREFILL), **of_engine)
    settings = WorkerSettings(WORKER, SERVICE, parts, url, 5.0, 1 << 20, 10.0)
    settings = replace(settings, **{name: value for name, value in changes.items() if not name.startswith("engine__")})
    node = place or NodePlace("127.0.0.1", 1)
    host = WorkerHost(settings, PrefillService, lambda: node, retire, lambda settings, clock: engine)
    host.start_in_background()
    return host


async def ready(host: WorkerHost) -> wire.WorkerRegistration:
    return await asyncio.to_thread(host.wait_ready, 10.0)


async def stopped(host: WorkerHost) -> bool:
    return await asyncio.to_thread(host.stop, 10.0)


async def test_a_redis_that_is_away_when_the_model_is_loaded_is_waited_for(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([redis.ConnectionError("away"), redis.TimeoutError("away")])
    for kind, name in ((ClaimFeed, "open"), (Registration, "publish")):
        # Redis answers every write but this one: no server goes away for one write.
        monkeypatch.setattr(kind, name, _fails_once(getattr(kind, name), failures))
    host = start(server, engine)
    await ready(host)

    assert next(failures, None) is None
    record = wire.WorkerRegistration.FromString(await client.get(registry.worker_key(SERVICE, WORKER)))
    assert record.state == wire.WORKER_STATE_READY
    assert await client.exists(registry.snapshot_key(SERVICE, WORKER))
    assert await stopped(host)


def _fails_once(method: Any, failures: Iterator[Exception]) -> Any:
    has_failed = False

    async def failing(self: Any) -> None:
        nonlocal has_failed
        if not has_failed and _is_served(self):
            has_failed = True
            raise next(failures)
        await method(self)

    return failing


def _is_served(writer: Any) -> bool:
    """Earlier records are written while the engine starts, and may fail by themselves."""
    return isinstance(writer, ClaimFeed) or writer.record.state == wire.WORKER_STATE_READY


async def test_the_engine_is_stopped_though_nothing_else_can_be_ended(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Any) -> None:
        raise ZeroDivisionError("of a test")

    # A defect of our own code has no port.
    monkeypatch.setattr(Registration, "close", fails)
    monkeypatch.setattr(ClaimFeed, "close", fails)
    host = start(server, engine)
    await ready(host)

    assert await stopped(host)
    assert engine.stopped


async def test_what_writes_has_ended_before_it_is_closed(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    at_close: list[set[str]] = []
    for kind in (ClaimFeed, Registration):
        # Redis does not show when a task that writes to it has ended.
        monkeypatch.setattr(kind, "keep", _noted(kind.keep, kind.__name__, running))
        monkeypatch.setattr(kind, "close", _noting(kind.close, running, at_close))
    host = start(server, engine)
    await ready(host)
    assert running == {"ClaimFeed", "Registration"}

    assert await stopped(host)
    assert at_close == [set(), set()]
    assert not await client.exists(registry.worker_key(SERVICE, WORKER))


def _noted(keep: Any, name: str, running: set[str]) -> Any:
    async def noted(self: Any) -> None:
        running.add(name)
        try:
            await keep(self)
        finally:
            await asyncio.sleep(0.01)
            running.discard(name)

    return noted


def _noting(close: Any, running: set[str], at_close: list[set[str]]) -> Any:
    async def noting(self: Any) -> None:
        at_close.append(set(running))
        await close(self)

    return noting


@pytest.mark.parametrize(
    ("changes", "place", "told"),
    [
        (
            {"versions": Versions(rachis="99.0.1")},
            None,
            rf"Rachis is .* on node {NODE} and 99\.0\.1 on the node of `rachis serve`; install the same on both",
        ),
        (
            {"engine__model": ModelSection(path="/models/none")},
            None,
            rf"the model /models/none is not on node {NODE}: there is no such folder; copy it there",
        ),
        (
            {"engine__host": "", "engine__network": "203.0.113.0/24"},
            None,
            rf"pools\.network: node {NODE} has no address in 203\.0\.113\.0/24, only ",
        ),
        (
            {"engine__host": ""},
            NodePlace("127.0.0.1", 3),
            rf"node {NODE} would be reached under 127\.0\.0\.1, which is loopback, but the Ray cluster has 3 nodes",
        ),
        (
            {"redis_url": "redis://:secret@127.0.0.1:1/0"},
            None,
            rf"the Redis at redis://:\*\*\*@127\.0\.0\.1:1/0 does not answer \(.*\) when node {NODE} asks",
        ),
    ],
)
async def test_a_worker_that_would_not_be_right_on_its_node_does_not_start(
    server: str, client: Any, engine: Engine, changes: dict[str, Any], place: NodePlace | None, told: str
) -> None:
    host = start(server, engine, place, **changes)
    with pytest.raises(StartError, match=told):
        await ready(host)

    assert await stopped(host)
    assert not await client.exists(registry.worker_key(SERVICE, WORKER))


async def test_a_worker_tells_who_it_is_and_listens_where_its_node_is_known(
    server: str, client: Any, engine: Engine
) -> None:
    host = start(server, engine, NodePlace("127.0.0.2", 1), engine__host="")
    record = await ready(host)

    assert record.address.startswith("127.0.0.2:")
    assert record.node == NODE
    assert record.versions.rachis and record.versions.vllm
    assert await stopped(host)


async def health(record: wire.WorkerRegistration) -> list[str]:
    async with grpc.aio.insecure_channel(record.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", WORKER_SERVICE, LIVENESS)]
        answers = [await stub.Check(request, timeout=60) for request in requests]
    return [health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) for answer in answers]


async def test_readiness_follows_draining_and_liveness_does_not(server: str, client: Any, engine: Engine) -> None:
    host = start(server, engine)
    record = await ready(host)
    assert await health(record) == ["SERVING"] * 3
    async with grpc.aio.insecure_channel(record.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.SetDraining(wire.SetDrainingRequest(draining=True))
        drained = await health(record)
        await stub.SetDraining(wire.SetDrainingRequest(draining=False))
    assert drained == ["NOT_SERVING", "NOT_SERVING", "SERVING"]
    assert await health(record) == ["SERVING"] * 3
    assert await stopped(host)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def sigterm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


async def prefilling(record: wire.WorkerRegistration, channel: Any) -> "asyncio.Task[Any]":
    stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
    request = wire.PrefillRequest(request_id="r", generation=record.generation, token_ids=[1, 2, 3])
    request.sampling.max_tokens = 1
    return asyncio.ensure_future(stub.Prefill(request, timeout=60))


async def test_a_process_that_is_asked_to_end_ends_once_what_it_runs_has_ended(
    server: str, client: Any, engine: Engine, ends: list[int], sigterm: None
) -> None:
    engine.hold_before(0)
    host = start(server, engine)
    own = await ready(host)
    host.end_on_sigterm()
    async with grpc.aio.insecure_channel(own.address) as channel:
        running = await prefilling(own, channel)
        await until(engine.held.is_set)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: own.state == wire.WORKER_STATE_DRAINING)
        await asyncio.sleep(6 * worker_host._DRAIN_POLL_S)
        assert not running.done() and not ends
        record = wire.WorkerRegistration.FromString(await client.get(registry.worker_key(SERVICE, WORKER)))
        assert record.state == wire.WORKER_STATE_DRAINING
        engine.loop.call_soon_threadsafe(engine.resume)
        assert (await running).first.token_ids

    await until(lambda: ends == [0])
    assert engine.stopped
    assert not await client.exists(registry.worker_key(SERVICE, WORKER))


@pytest.mark.parametrize("how", ["it took too long", "asked twice"])
async def test_a_process_does_not_wait_for_ever_for_what_it_runs(
    server: str, client: Any, engine: Engine, ends: list[int], sigterm: None, how: str
) -> None:
    engine.hold_before(0)
    host = start(server, engine, drain_timeout_s=0.5 if how == "it took too long" else 600.0)
    own = await ready(host)
    host.end_on_sigterm()
    async with grpc.aio.insecure_channel(own.address) as channel:
        running = await prefilling(own, channel)
        await until(engine.held.is_set)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: own.state == wire.WORKER_STATE_DRAINING)
        if how == "asked twice":
            os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: ends == [0])
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_a_process_that_does_not_serve_yet_ends_at_once(
    server: str, client: Any, ends: list[int], sigterm: None
) -> None:
    config = RachisConfig()
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.PREFILL)
    host = WorkerHost(WorkerSettings(WORKER, SERVICE, settings, server, 5.0, 1 << 20, 10.0), PrefillService)
    host.end_on_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)

    assert ends == [0]


def test_what_the_node_says_of_ucx_and_flashinfer_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "ib0")
    for name in ("UCX_TCP_PORT_RANGE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    ours = {"UCX_NET_DEVICES": "eth0", "UCX_TCP_PORT_RANGE": "1-2", "OMP_NUM_THREADS": "1"}
    own_node.set_environment({**ours, "VLLM_USE_FLASHINFER_SAMPLER": "0"})

    names = ("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE", "OMP_NUM_THREADS", "VLLM_USE_FLASHINFER_SAMPLER")
    assert [os.environ[name] for name in names] == ["ib0", "1-2", "1", "1"]


async def test_a_worker_that_was_stopped_is_not_ready_for_whoever_asks_next(
    server: str, client: Any, engine: Engine
) -> None:
    host = start(server, engine)
    await ready(host)
    assert await stopped(host)
    with pytest.raises(StartError, match=f"worker {WORKER} has been stopped"):
        await ready(host)


async def test_a_worker_that_nobody_keeps_any_more_stops_its_engine_and_retires(
    server: str, client: Any, engine: Engine
) -> None:
    retired = threading.Event()
    lease = registry.lease_key(SERVICE)
    await client.set(lease, json.dumps({"keeps": registry_digest(server)}))
    host = start(server, engine, retire=retired.set, orphan_s=0.4)
    await ready(host)
    # Twice as long, and longer: it is kept.
    assert not await asyncio.to_thread(retired.wait, 1.0)

    await client.set(lease, json.dumps({"keeps": registry_digest("redis://elsewhere")}))

    assert await asyncio.to_thread(retired.wait, 30.0)
    assert engine.stopped
    assert not await client.exists(registry.worker_key(SERVICE, WORKER))


async def test_a_worker_that_does_not_outlive_its_service_asks_nobody_whether_it_is_kept(
    server: str, client: Any, engine: Engine
) -> None:
    retired = threading.Event()
    host = start(server, engine, retire=retired.set)
    await ready(host)
    assert not await asyncio.to_thread(retired.wait, 1.0)
    assert await stopped(host)
    assert not retired.is_set()
