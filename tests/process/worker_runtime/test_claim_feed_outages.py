"""The feed of claims while Redis is away: changes are merged in bounded memory, and written when it is back."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_core.engine_reports import PrefixClaimChange
from cluster_wire import registry
from cluster_wire.redis_client import connect
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from tests.process.worker_runtime.claim_feed_world import (
    INDEX,
    SERVICE,
    WORKER,
    Server,
    device,
    feeding,
    holds,
    on_device,
    reads,
    until,
)
from worker_runtime.claim_feed import ClaimFeed, FeedTiming
from worker_runtime.registration import Registration


async def test_an_outage_is_outlived_and_merged(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(*range(100)))
        await reads(client, on_device(*range(100)))
        server.stop()
        rng = random.Random(3)
        claims = set(range(100))
        for _ in range(2000):
            key = rng.randrange(300)
            (claims.discard if key in claims else claims.add)(key)
            feed.changed(PrefixClaimChange({key: key in claims}))
            if rng.random() < 0.01:
                await asyncio.sleep(0.001)
        # 300 chunks, and the batch that was on its way.
        assert feed.waiting_keys() <= 600
        await until(lambda: holds(lambda: feed.counters.outages == 1))
        again = await server.start()

        await reads(again, on_device(*claims))
        await again.aclose()


async def test_a_long_outage_takes_no_more_memory_than_a_snapshot(server: Server, client: redis.Redis) -> None:
    async with feeding(server, timing=FeedTiming(slack_keys=50)) as feed:
        server.stop()
        for key in range(10_000):
            feed.changed(device(key + 1, gone=(key,)))
            assert feed.waiting_keys() <= 60
        again = await server.start()

        await reads(again, on_device(10_000))
        await again.aclose()


async def test_changes_of_an_outage_are_merged_however_often_writing_is_tried(
    server: Server, client: redis.Redis
) -> None:
    async with feeding(server, timing=FeedTiming(retry_s=0.001)) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        server.stop()
        feed.changed(device(2))
        await until(lambda: holds(lambda: feed.counters.outages == 1))
        for step in range(50):
            feed.changed(PrefixClaimChange({3: step % 2 == 1}))
            await asyncio.sleep(0.005)
            # The batch that was on its way, and the last state of the chunk.
            assert feed.waiting_keys() <= 2
        again = await server.start()

        await reads(again, on_device(1, 2, 3))
        await again.aclose()


async def test_stored_blocks_are_told_once_they_are_written(server: Server, client: redis.Redis) -> None:
    stored_blocks = 0
    feed = ClaimFeed(
        connect(server.url, 1.0),
        SERVICE,
        WORKER,
        1000,
        INDEX,
        count_stored_blocks=lambda: stored_blocks,
    )
    await feed.open()
    task = asyncio.create_task(feed.keep())
    stored_blocks = 3
    await until(lambda: holds(lambda: feed.stored_blocks == 3))
    server.stop()
    stored_blocks = 5
    feed.changed(device(1))
    await until(lambda: holds(lambda: feed.counters.outages == 1))
    assert feed.stored_blocks == 3
    again = await server.start()
    await until(lambda: holds(lambda: feed.stored_blocks == 5))

    await again.aclose()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await feed.close()


async def test_a_service_outlives_a_redis_that_was_away(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A router and a worker go on with what they have, and meet again in a Redis that has lost everything."""
    record = wire.WorkerRegistration(worker_id=WORKER)
    feeds: list[ClaimFeed] = []

    def refresh() -> None:
        record.claims_sequence = feeds[0].claims_sequence if feeds else 0

    registration = Registration(connect(server.url, 1.0), SERVICE, record, 1.0, refresh)
    generation = await registration.open()
    membership, index = Membership(), PrefixIndex(1 << 12, half_life_s=600.0)
    registry_follower = RegistryFollower(
        connect(server.url, 2.0), SERVICE, membership, refresh_s=0.01, worker_lease_s=5.0
    )
    section = IndexSection(refresh_s=0.01)
    follower = IndexFollower(connect(server.url, 2.0), SERVICE, membership, index, section)
    loops = (registration.keep, registry_follower.follow, follower.follow)
    tasks = [asyncio.create_task(loop()) for loop in loops]

    def knows(*keys: int) -> Callable[[], Awaitable[bool]]:
        return lambda: holds(lambda: set(index.claims(WORKER)[0].tolist()) == set(keys))

    async with feeding(server, generation) as feed:
        feeds.append(feed)
        feed.changed(device(1, 2))
        await until(knows(1, 2))
        server.stop()
        feed.changed(device(3))
        await until(lambda: holds(lambda: not follower.connected and not registry_follower.connected))
        await until(lambda: holds(lambda: feed.counters.outages == 1))
        await asyncio.sleep(0.3)
        assert set(index.claims(WORKER)[0].tolist()) == {1, 2}
        again = await server.start()

        await until(knows(1, 2, 3))
        await until(lambda: holds(lambda: follower.connected and registry_follower.connected))
        assert await again.exists(registry.worker_key(SERVICE, WORKER))
        await again.aclose()
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in (registration, registry_follower, follower):
        await each.close()
    assert not [entry for entry in caplog.records if entry.exc_info and entry.name != "asyncio"]
