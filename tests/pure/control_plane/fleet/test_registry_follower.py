"""How a router follows the registry through outages: the last known workers stay, and get time to come back."""

import asyncio
from collections.abc import AsyncIterator, Set
from random import Random
from typing import cast

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.versions import Versions
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network
from tests.fakes.cluster import until

SERVICE = "svc-test"


class Client(LocalRedis):
    """Counts how often the workers' names are read, in vain or not."""

    reads = 0

    async def smembers(self, key: str) -> Set[bytes]:
        self.reads += 1
        names: Set[bytes] = await self.__getattr__("smembers")(key)
        return names


class Followed:
    """A follower at work on a registry in memory and a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.store = Store()
        self.membership = Membership()
        self.client = Client(self.store, Network(Random(0), latency_s=0.0), "router", timeout_s=1.0)
        self.follower = RegistryFollower(
            cast(RedisClient, self.client),
            SERVICE,
            self.membership,
            refresh_s=0.0,
            worker_lease_s=5.0,
            now_s=lambda: self.now_s,
        )

    def workers(self) -> list[str]:
        return [worker.worker_id for worker in self.membership.usable(wire.POOL_DECODE)]

    async def read(self) -> None:
        """The follower has read at least once from here on, and carried out what it read."""
        reads = self.client.reads
        await until(lambda: self.client.reads >= reads + 2)

    def write(self, record: wire.WorkerRegistration) -> None:
        self.write_raw(record.worker_id, record.SerializeToString())

    def write_raw(self, name: str, record: bytes) -> None:
        self.store.sadd(registry.workers_key(SERVICE), name)
        self.store.set(registry.worker_key(SERVICE, name), record)


def record(name: str) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(
        worker_id=name, generation=1, pool=wire.POOL_DECODE, state=wire.WORKER_STATE_READY, address="x:1"
    )


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    followed = Followed()
    followed.write(record("decode-0"))
    task = asyncio.create_task(followed.follower.follow())
    await until(lambda: followed.workers() == ["decode-0"])
    yield followed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_record_whose_lease_ended_takes_its_worker_out(followed: Followed) -> None:
    followed.store.delete(registry.worker_key(SERVICE, "decode-0"))

    await until(lambda: followed.workers() == [])


async def test_a_version_that_does_not_fit_is_told_once_and_again_after_a_change(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.membership.versions = Versions(vllm="0.32.0")
    for generation, vllm in ((1, "0.33.0"), (2, "0.32.0"), (3, "0.33.0")):
        other = record("decode-1")
        other.generation, other.node, other.versions.vllm = generation, "b", vllm
        followed.write(other)
        for _ in range(3):
            await followed.read()
        assert ("decode-1" in followed.workers()) == (generation == 2)

    # The garbage collector may have told of other tests' tasks meanwhile.
    told = [each.getMessage() for each in caplog.records if each.name.startswith("control_plane")]
    assert told == ["decode-1 gets no requests: vLLM is 0.33.0 on node b and 0.32.0 on the router's node"] * 2


async def test_an_outage_keeps_the_last_known_workers(followed: Followed) -> None:
    followed.store.is_down = True
    await followed.read()
    followed.now_s += 1000.0
    await followed.read()

    assert followed.workers() == ["decode-0"]
    assert not followed.follower.connected


async def test_after_an_outage_workers_have_one_lease_to_register_again(followed: Followed) -> None:
    followed.store.is_down = True
    await followed.read()
    followed.store.flushall()
    followed.store.is_down = False
    followed.write(record("decode-1"))
    await followed.read()
    assert followed.follower.connected
    assert followed.workers() == ["decode-0", "decode-1"]

    followed.now_s += 4.9
    await followed.read()
    assert followed.workers() == ["decode-0", "decode-1"]

    followed.now_s += 0.1
    await followed.read()
    assert followed.workers() == ["decode-1"]


async def test_a_registry_that_lost_its_data_without_a_pause_gives_workers_one_lease_as_well(
    followed: Followed,
) -> None:
    followed.write(record("decode-1"))
    await until(lambda: followed.workers() == ["decode-0", "decode-1"])
    followed.store.flushall()
    await followed.read()
    assert followed.follower.connected
    assert followed.workers() == ["decode-0", "decode-1"]

    followed.now_s += 2.0
    followed.write(record("decode-1"))
    await followed.read()
    followed.now_s += 2.9
    await followed.read()
    assert followed.workers() == ["decode-0", "decode-1"]

    followed.now_s += 0.1
    await followed.read()
    assert followed.workers() == ["decode-1"]


async def test_where_all_records_end_at_once_workers_have_one_lease_to_renew_them(followed: Followed) -> None:
    """Redis's clock was set forward, or the host slept."""
    names = ["decode-0", "decode-1", "decode-2"]
    for name in names:
        followed.write(record(name))
    await until(lambda: followed.workers() == names)
    for name in names:
        followed.store.delete(registry.worker_key(SERVICE, name))
    await followed.read()
    assert followed.workers() == names
    assert followed.follower.losses == 1

    followed.now_s += 2.0
    for name in names[:2]:
        followed.write(record(name))
    await followed.read()
    assert followed.workers() == names
    followed.now_s += 3.0
    await followed.read()
    assert followed.workers() == names[:2]


async def test_workers_that_all_end_are_gone_after_one_lease_and_at_once_where_they_said_so(followed: Followed) -> None:
    names = ["decode-0", "decode-1"]
    for state in (wire.WORKER_STATE_READY, wire.WORKER_STATE_DRAINING):
        for name in names:
            said = record(name)
            said.state = state
            followed.write(said)
        await followed.read()
        assert len(followed.membership.members()) == 2
        for name in names:
            followed.store.delete(registry.worker_key(SERVICE, name))
        await followed.read()
        assert bool(followed.membership.members()) == (state == wire.WORKER_STATE_READY)
        followed.now_s += 5.0
        await followed.read()
        assert not followed.membership.members()


async def test_it_counts_how_often_redis_may_have_lost_what_it_had(followed: Followed) -> None:
    assert followed.follower.losses == 0
    for _ in range(3):
        await followed.read()
    assert followed.follower.losses == 0
    followed.store.flushall()
    for _ in range(3):
        await followed.read()
    assert followed.follower.losses == 1
    followed.write(record("decode-0"))
    await followed.read()
    followed.store.is_down = True
    await followed.read()
    # It comes back with all workers, or they were quicker than the router.
    followed.store.is_down = False
    await followed.read()
    assert followed.follower.losses == 2


async def test_who_waits_for_a_change_hears_of_a_new_worker(followed: Followed) -> None:
    async def wait_for_decode_1() -> None:
        async with followed.follower.changed:
            await followed.follower.changed.wait_for(lambda: "decode-1" in followed.workers())

    waiter = asyncio.create_task(wait_for_decode_1())
    await followed.read()
    assert not waiter.done()

    followed.write(record("decode-1"))

    async with asyncio.timeout(5):
        await waiter


async def test_a_damaged_record_does_not_stop_the_router_from_following(followed: Followed) -> None:
    followed.write_raw("decode-1", b"\xff\xff\xff")

    followed.write(record("decode-2"))

    await until(lambda: "decode-2" in followed.workers(), timeout_s=0.5)
