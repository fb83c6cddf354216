"""A size that somebody asked for outlives `rachis serve`, until the configuration changes."""

import asyncio
from typing import cast

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from control_plane.pools.kept_sizes import KeptSizes, held
from tests.fakes.cluster import until
from tests.fakes.registry import RegistryRedis

SIZES = {wire.POOL_PREFILL: 1, wire.POOL_DECODE: 2}


@pytest.mark.parametrize(
    ("kept", "size"),
    [
        (None, 2),
        (b'{"decode": {"size": 3, "configured": 2}}', 3),
        (b'{"decode": {"size": 1, "configured": 2}, "prefill": 7}', 1),
        (b'{"decode": {"size": 3, "configured": 4}}', 2),
        (b'{"decode": {"size": 0, "configured": 2}}', 2),
        (b'{"decode": {"size": 99999, "configured": 2}}', 2),
        (b'{"decode": {"size": "3", "configured": 2}}', 2),
        (b'{"decode": 3}', 2),
        (b"[3]", 2),
        (b"not JSON", 2),
    ],
)
def test_what_is_kept_holds_while_the_configuration_stays_and_it_is_a_size(kept: bytes | None, size: int) -> None:
    assert held(kept, SIZES) == {wire.POOL_PREFILL: 1, wire.POOL_DECODE: size}


async def test_what_one_start_keeps_the_next_one_reads() -> None:
    redis = RegistryRedis("chat")
    first, second = (KeptSizes(cast(RedisClient, redis), "chat", SIZES) for _ in range(2))
    assert await second.read() == SIZES
    first.keep({wire.POOL_PREFILL: 3, wire.POOL_DECODE: 2})
    await until(lambda: bool(redis.store.exists(registry.sizes_key("chat"))))
    assert await second.read() == {wire.POOL_PREFILL: 3, wire.POOL_DECODE: 2}
    others = KeptSizes(cast(RedisClient, redis), "chat", {wire.POOL_PREFILL: 2, wire.POOL_DECODE: 2})
    assert await others.read() == {wire.POOL_PREFILL: 2, wire.POOL_DECODE: 2}


async def test_what_was_asked_for_is_not_known_where_redis_does_not_answer() -> None:
    redis = RegistryRedis("chat")
    redis.silent.add(registry.sizes_key("chat"))
    assert await KeptSizes(cast(RedisClient, redis), "chat", SIZES).read() is None


async def test_what_redis_has_lost_is_written_again_and_nothing_else_is() -> None:
    redis, losses, scaled = RegistryRedis("chat"), 0, {wire.POOL_PREFILL: 1, wire.POOL_DECODE: 6}
    kept, key = KeptSizes(cast(RedisClient, redis), "chat", SIZES, lambda: losses), registry.sizes_key("chat")

    async def looks() -> bool:
        for _ in range(10):
            kept.keep(scaled)
            await asyncio.sleep(0)
        return bool(redis.store.exists(key))

    assert await looks()
    redis.store.delete(key)
    assert not await looks()
    losses = 1
    assert await looks()
    assert await kept.read() == scaled


async def test_sizes_that_are_lost_while_they_are_written_are_written_again() -> None:
    redis, losses = RegistryRedis("chat"), 0
    kept, key = KeptSizes(cast(RedisClient, redis), "chat", SIZES, lambda: losses), registry.sizes_key("chat")
    kept.keep(SIZES)
    losses = 1
    await until(lambda: bool(redis.store.exists(key)))
    redis.store.delete(key)
    for _ in range(10):
        kept.keep(SIZES)
        await asyncio.sleep(0)
    assert redis.store.exists(key)
