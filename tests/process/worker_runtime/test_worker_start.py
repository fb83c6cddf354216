"""In which order a worker comes up, and what of it the registry knows when."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineInfo
from cluster_wire import registry
from decode_worker.service import DecodeService
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network
from tests.fakes.engine import FakeEngine
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.registration import Registration
from worker_runtime.service import WorkerServiceBase
from worker_runtime.worker_start import RegistryPlace, WorkerStart

SERVICE, WORKER = "svc-test", "decode-0"


class Ports:
    """A worker over an engine that computes nothing; `seen` has what the registry knew before each write with retries.

    fails_at: which of these writes fails.
    """

    def __init__(self, store: Store, fails_at: int = -1) -> None:
        self.seen: list[tuple[str, bool]] = []
        # Once it is made.
        self.feed: Any = None
        self._store = store
        self._fails_at = fails_at

    async def take_generation(self, registration: Registration) -> int:
        return await registration.open()

    def make_engine(self, generation: int) -> Engine:
        return FakeEngine()

    async def start_engine(self, engine: Engine, registration: Registration) -> EngineInfo:
        await registration.publish()
        return await engine.start(lambda phase: None, lambda why: None)

    def make_service(
        self, engine: Engine, record: wire.WorkerRegistration, on_state: Callable[[], None], feed: ClaimFeed
    ) -> WorkerServiceBase:
        self.feed = feed
        return DecodeService(engine, record, on_state, feed)

    def give_up(self, why: str) -> None:
        raise AssertionError(why)

    def make_server(self) -> "Server":
        return Server()

    async def with_retries(self, write: Callable[[], Awaitable[None]]) -> None:
        state = wire.WorkerState.Name(registered(self._store).state).removeprefix("WORKER_STATE_")
        self.seen.append((state, bool(self._store.exists(registry.snapshot_key(SERVICE, WORKER)))))
        if len(self.seen) - 1 == self._fails_at:
            raise redis.ConnectionError("away for too long")
        await write()


class Server:
    async def start(self, servicer: WorkerServiceBase) -> str:
        return "here:1"

    def state_changed(self) -> None:
        """Nothing looks at it."""


@pytest.fixture
def store() -> Store:
    """The data of the registry that all clients made in the test speak to."""
    return Store()


def start(ports: Ports, store: Store) -> WorkerStart:
    record = wire.WorkerRegistration(worker_id=WORKER, pool=wire.POOL_DECODE, state=wire.WORKER_STATE_STARTING)
    network = Network(Random(0), latency_s=0.0)

    def connect() -> Any:
        return LocalRedis(store, network, "worker", 5.0)

    return WorkerStart(RegistryPlace(connect, SERVICE, 5.0, IndexSection(), 60.0), record, ClusterClock(), ports)


def registered(store: Store) -> wire.WorkerRegistration:
    return wire.WorkerRegistration.FromString(store.get(registry.worker_key(SERVICE, WORKER)) or b"")


async def test_a_worker_is_ready_only_once_what_the_generation_before_claimed_is_void(store: Store) -> None:
    ports = Ports(store)
    async with AsyncExitStack() as ends:
        await start(ports, store).bring_up(ends)

        assert ports.seen == [("STARTING", False), ("STARTING", True)]
        record = registered(store)
        assert (record.state, record.address, record.phase) == (wire.WORKER_STATE_READY, "here:1", "serving")
        assert record.block_size_tokens == 4


async def test_the_registration_tells_of_blocks_that_are_in_the_stream(store: Store) -> None:
    ports = Ports(store)
    worker = start(ports, store)
    async with AsyncExitStack() as ends:
        await worker.bring_up(ends)
        feed = ports.feed
        feed.stored_blocks = 7
        # It writes no more, which no method of it does while its worker lives.
        feed._has_ended = True
        await worker.registration.publish()

        assert registered(store).stored_blocks == 7
        assert registered(store).claims_sequence == feed.sequence + 1


@pytest.mark.parametrize("fails_at", [0, 1])
async def test_a_start_that_fails_leaves_no_registration_and_no_task(store: Store, fails_at: int) -> None:
    worker = start(Ports(store, fails_at), store)
    with pytest.raises(redis.ConnectionError):
        async with AsyncExitStack() as ends:
            await worker.bring_up(ends)

    assert len(worker.background) == 0
    assert not store.exists(registry.worker_key(SERVICE, WORKER))
