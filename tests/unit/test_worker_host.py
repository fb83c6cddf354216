"""How a worker comes up and goes, on a real Redis and an engine that computes nothing."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis.asyncio as redis
from rachis import registry
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import RachisConfig
from prefill_worker.service import PrefillService
from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import running_redis
from worker_runtime import host as worker_host
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.host import WorkerHost, WorkerSettings
from worker_runtime.registration import Registration

SERVICE, WORKER = "svc-test", "prefill-0"


class Engine(FakeEngine):
    stopped = False

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
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    module = ModuleType("worker_runtime.vllm_engine")
    module.VllmEngine = lambda settings, clock: engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(worker_host, "engine_environment", lambda settings: {})
    return engine


def start(url: str, start_timeout_s: float = 10.0) -> WorkerHost:
    config = RachisConfig()
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.PREFILL)
    host = WorkerHost(WorkerSettings(WORKER, SERVICE, settings, url, 5.0, 1 << 20, start_timeout_s), PrefillService)
    host.start_in_background()
    return host


async def ready(host: WorkerHost) -> None:
    await asyncio.to_thread(host.wait_ready, 10.0)


async def stopped(host: WorkerHost) -> bool:
    return await asyncio.to_thread(host.stop, 10.0)


async def test_a_redis_that_is_away_when_the_model_is_loaded_is_waited_for(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([redis.ConnectionError("away"), redis.TimeoutError("away")])
    for kind, name in ((ClaimFeed, "open"), (Registration, "publish")):
        monkeypatch.setattr(kind, name, _fails_once(getattr(kind, name), failures))
    monkeypatch.setattr(worker_host, "_RETRY_S", 0.01)
    host = start(server)
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
    return isinstance(writer, ClaimFeed) or writer._record.state == wire.WORKER_STATE_READY


async def test_the_engine_is_stopped_though_nothing_else_can_be_ended(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Any) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(Registration, "close", fails)
    monkeypatch.setattr(ClaimFeed, "close", fails)
    host = start(server)
    await ready(host)

    assert await stopped(host)
    assert engine.stopped


async def test_what_writes_has_ended_before_it_is_closed(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    at_close: list[set[str]] = []
    for kind in (ClaimFeed, Registration):
        monkeypatch.setattr(kind, "keep", _noted(kind.keep, kind.__name__, running))
        monkeypatch.setattr(kind, "close", _noting(kind.close, running, at_close))
    host = start(server)
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


async def test_the_registration_tells_of_blocks_that_are_in_the_stream(
    server: str, client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start(server)
    await ready(host)
    feed = host._feed
    assert feed is not None
    feed.stored_blocks = 7
    feed._is_stuck = True
    host._bring_up_to_date(engine)

    assert host._record.stored_blocks == 7
    assert host._record.claims_sequence == feed.sequence + 1
    assert await stopped(host)
