"""A Redis whose memory is full takes nothing new, and costs no worker its lease."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, connect
from control_plane.fleet.fencing import Fence
from control_plane.fleet.load_sharing import LoadSharing
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.placement import replicator
from control_plane.prefix_index import access_log
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from control_plane.service.lease import ServiceLease
from tests.planting import planted
from tests.process.worker_runtime.claim_feed_world import (
    INDEX,
    SERVICE,
    WORKER,
    Server,
    device,
    feeding,
    on_device,
    reads,
    until,
)
from worker_runtime import registration
from worker_runtime.registration import Registration


@pytest.fixture
async def full(server: Server, client: redis.Redis) -> AsyncIterator[redis.Redis]:
    await client.config_set("maxmemory", "1")
    with pytest.raises(redis.OutOfMemoryError):
        await client.set(f"{{{SERVICE}}}:more", "x" * 1000)
    yield client
    await client.config_set("maxmemory", "0")


def registered(server: Server, lease_s: float = 5.0) -> Registration:
    return Registration(connect(server.url, 5.0), SERVICE, wire.WorkerRegistration(worker_id=WORKER, pid=7), lease_s)


async def test_workers_register_renew_and_leave(server: Server, full: redis.Redis) -> None:
    worker = registered(server)
    await worker.open()
    await worker.publish()
    await worker.publish()
    key = registry.worker_key(SERVICE, WORKER)
    assert 0 < await full.pttl(key) <= 5000
    assert await full.sismember(registry.workers_key(SERVICE), WORKER)
    for kept in (registry.workers_key(SERVICE), registry.generation_key(SERVICE)):
        assert registry.KEPT_MS - 60_000 < await full.pttl(kept) <= registry.KEPT_MS

    older, newer = worker, registered(server)
    await newer.open()
    await newer.publish()
    assert newer.record.generation > older.record.generation
    await newer.close()
    assert not await full.exists(key)
    await older.close()


async def test_a_worker_that_is_given_up_is_fenced(server: Server, full: redis.Redis) -> None:
    worker = registered(server)
    await worker.open()
    await worker.publish()
    fence = Fence(connect(server.url, 5.0), SERVICE)
    assert await fence.close_out(WORKER, worker.record.generation)
    await worker.publish()
    assert not await full.exists(registry.worker_key(SERVICE, WORKER))
    await worker.close()
    await fence.close()


async def test_a_worker_that_starts_opens_its_feed(server: Server, full: redis.Redis) -> None:
    async with feeding(server) as feed:
        assert feed.sequence >= 0
    assert [key async for key in full.scan_iter()]


async def test_what_workers_claim_is_written(server: Server, full: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1, 2))
        await reads(full, on_device(1, 2))
        feed.changed(device(3, gone=(1,)))
        await reads(full, on_device(2, 3))
        assert not feed.counters.outages


async def test_routers_tell_their_loads_copy_prefixes_and_sum_up_what_is_hot(server: Server, full: redis.Redis) -> None:
    sharing = LoadSharing(connect(server.url, 5.0), SERVICE, Membership(), router_id="r", every_s=1.0)
    await sharing.share()
    assert await full.hexists(registry.loads_key(SERVICE), "r")
    assert 0 < await full.pttl(registry.loads_key(SERVICE)) <= 60_000
    await sharing.close()
    plain: Any = full
    assert await plain.eval(replicator.HOLD, 1, registry.replication_key(SERVICE), "r", 5000) == 1
    stream, hotness = registry.accesses_key(SERVICE, 0), registry.hotness_key(SERVICE, 0)
    assert await plain.eval(access_log.WRITE_SNAPSHOT, 2, stream, hotness, b"", b"snapshot", 0, 60_000) == 1
    assert await full.get(hotness) == b"snapshot"


async def test_a_batch_that_was_lost_is_repaired(server: Server, full: redis.Redis) -> None:
    membership, index = Membership(), PrefixIndex(1024, 600.0)
    membership.replace([wire.WorkerRegistration(worker_id=WORKER, generation=1000, pool=wire.POOL_PREFILL)])
    follower = IndexFollower(connect(server.url, 5.0), SERVICE, membership, index, INDEX)
    async with feeding(server) as feed:
        for key in (1, 2, 3):
            feed.changed(device(key))
            await reads(full, on_device(*range(1, key + 1)))
        await full.xdel(registry.claims_key(SERVICE, WORKER), "1000-2")

        async def is_repaired() -> bool:
            await follower.poll()
            return sorted(index.claims(WORKER)[0].tolist()) == [1, 2, 3]

        await until(is_repaired)
    await follower.close()


async def test_a_router_says_how_full_it_is(server: Server, full: redis.Redis) -> None:
    follower = RegistryFollower(connect(server.url, 5.0), SERVICE, Membership(), refresh_s=0.01, worker_lease_s=5.0)
    following, acl = asyncio.create_task(follower.follow()), cast(Any, full)
    try:
        for limit in (1, 1 << 30):
            await full.config_set("maxmemory", limit)
            async with asyncio.timeout(60):
                while (memory := await follower.redis_memory()) is None:  # noqa: ASYNC110 - it says nothing of it
                    await asyncio.sleep(0.01)
            assert memory.limit_bytes == limit and 100_000 < memory.used_bytes < 1 << 30
        for name, value, unset in (("maxmemory-policy", "allkeys-lru", "noeviction"), ("maxmemory", "0", "1")):
            await full.config_set(name, value)
            assert await follower.redis_memory() is None, "it is never full"
            await full.config_set(name, unset)
        await acl.execute_command("ACL", "SETUSER", "default", "-info")
        assert await follower.redis_memory() is None, "it does not say"
    finally:
        await acl.execute_command("ACL", "SETUSER", "default", "+info")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await follower.close()


async def test_a_service_takes_its_name_and_keeps_it(server: Server, full: redis.Redis) -> None:
    lease = ServiceLease(connect(server.url, 5.0), server.url, SERVICE, lease_s=1.0)
    await lease.take()
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(1.5)
    held = [await full.pttl(key) async for key in full.scan_iter()]
    assert any(left_ms > 0 for left_ms in held)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await lease.give_back()


async def test_a_script_that_begins_with_a_write_that_needs_memory_is_refused(
    server: Server, full: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the first test."""
    plain = registration.PUBLISH.replace("redis.call('PEXPIRE', KEYS[1], ARGV[4])\n", "")
    assert plain != registration.PUBLISH
    planted(monkeypatch, registration, "PUBLISH", plain)
    worker = registered(server)
    await worker.open()
    with pytest.raises(REDIS_DOWN):
        await worker.publish()
    await worker.close()
