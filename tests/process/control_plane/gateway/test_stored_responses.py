"""Stored responses in a real Redis: bounded, expiring, and away without costing anybody an answer."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cluster_configs.schema import StoredResponsesSection
from cluster_core.ports import hold_port
from cluster_wire.redis_client import RedisClient, connect
from control_plane.gateway.stored_record import Record, written
from control_plane.gateway.stored_responses import StoreAwayError, StoreCounts, StoredResponses
from control_plane.service.embedded_redis import REGISTRY_MIB, EmbeddedRedis, memory_mib
from tests.fakes.redis_server import running_redis

KIB = 1 / 1024


def record(number: int, characters: int = 10) -> Record:
    text = "a" * characters
    return Record(f"resp_{number}", ({"role": "user", "content": text},), {"id": f"resp_{number}"})


@pytest.fixture(scope="module", params=[False, True], ids=["server", "cluster"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_redis(tmp_path_factory.mktemp("redis"), is_cluster=request.param) as found:
        yield found


@pytest_asyncio.fixture
async def redis(url: str) -> AsyncIterator[Any]:
    client: Any = connect(url, 5)
    await client.flushall()
    yield client
    await client.aclose()


def store_of(redis: RedisClient, timing: dict[str, Any] | None = None, **section: Any) -> StoredResponses:
    return StoredResponses(redis, "svc", StoredResponsesSection(**section), **(timing or {}))


async def test_what_is_stored_is_found_until_it_is_deleted(redis: Redis) -> None:
    store = store_of(redis)
    await store.store(record(1))
    assert await store.find("resp_1") == record(1)
    assert await store_of(redis).find("resp_1") == record(1), "another process has it too"
    assert [await store.delete("resp_1"), await store.delete("resp_1")] == [True, False]
    assert [await store.find(name) for name in ("resp_1", "resp_2", "no id", "resp_*")] == [None] * 4
    assert await holds(redis) == (0, 0)


async def test_a_response_is_never_another_ones(redis: Redis) -> None:
    store = store_of(redis)
    await store.store(record(1))
    await store.store(Record("resp_1", (), {"id": "forged"}))
    assert await store.find("resp_1") == record(1)
    assert store.counts == StoreCounts(stored=1, not_stored=1)
    other = StoredResponses(redis, "other", StoredResponsesSection())
    assert await other.find("resp_1") is None, "of another service on the same Redis"


async def test_it_expires(redis: Redis) -> None:
    await store_of(redis, lifetime_s=1000).store(record(1))
    left_ms = await redis.pttl("rachis:{svc}:response:resp_1")
    assert 990_000 < left_ms <= 1_000_000


async def test_what_has_expired_takes_no_room(redis: Redis) -> None:
    await store_of(redis, lifetime_s=0.001).store(record(1))
    while await redis.exists("rachis:{svc}:response:resp_1"):  # noqa: ASYNC110 - it is Redis that waits
        await asyncio.sleep(0.001)
    await store_of(redis, lifetime_s=0.001).store(record(2))
    assert (await holds(redis))[0] <= 1


async def test_the_oldest_go_for_the_number(redis: Redis) -> None:
    store = store_of(redis, max_responses=3)
    for number in range(5):
        await store.store(record(number))
    found = [await store.find(f"resp_{number}") is not None for number in range(5)]
    assert sum(found) == 3
    assert found[4]


async def test_the_oldest_go_for_the_bytes_and_a_large_one_is_not_stored(redis: Redis) -> None:
    store = store_of(redis, max_total_mib=8 * KIB, max_response_mib=4 * KIB)
    for number in range(9):
        await store.store(record(number, 3000))
    assert await store.find("resp_8") is not None
    assert (await holds(redis))[1] <= 8192
    await store.store(record(9, 5000))
    assert await store.find("resp_9") is None
    assert store.counts == StoreCounts(stored=9, too_large=1)


@pytest.mark.parametrize("seed", range(3))
async def test_the_books_agree_with_what_is_there(redis: Redis, seed: int) -> None:
    rng = random.Random(seed)
    await redis.flushall()
    stores = [store_of(redis, max_responses=5, max_total_mib=6 * KIB) for _ in range(2)]
    for _ in range(60):
        store, number = rng.choice(stores), rng.randrange(12)
        if rng.random() < 0.3:
            await store.delete(f"resp_{number}")
        else:
            await store.store(record(number, rng.randrange(2500)))
        assert (await holds(redis))[0] <= 5
    sizes = [len(written(found)) for number in range(12) if (found := await stores[0].find(f"resp_{number}"))]
    assert await holds(redis) == (len(sizes), sum(sizes))


async def holds(redis: Redis) -> tuple[int, int]:
    """(responses, bytes), by its books."""
    total = await redis.hget("rachis:{svc}:response-sizes", "")
    return await redis.zcard("rachis:{svc}:response-order"), int(total or 0)


# Full.

MIB = 1 << 20


@asynccontextmanager
async def full(url: str, left_bytes: int) -> AsyncIterator[Redis]:
    """A client of a server that takes so much more and evicts nothing."""
    server = Redis.from_url(url.replace("+cluster", ""))
    await server.flushall()
    await server.config_set("maxmemory", (await server.info("memory"))["used_memory"] + left_bytes)
    try:
        yield server
    finally:
        await server.config_set("maxmemory", 0)
        await server.flushall()
        await server.aclose()


@pytest.mark.parametrize("says_how_full", [True, False])
async def test_in_a_redis_that_is_smaller_than_their_limits_the_oldest_go(url: str, says_how_full: bool) -> None:
    async with full(url, 8 * MIB) as server:
        if not says_how_full:
            await server.acl_setuser("gateway", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
        named = url if says_how_full else url.replace("://", "://gateway:any@")
        store = store_of(connect(named, 5))
        for number in range(60):
            await store.store(record(number, MIB // 4))
            if says_how_full:
                assert await server.set("{svc}:registration", "a" * 1000), "the rest is the registry's"
        assert store.counts == StoreCounts(stored=60)
        assert await store.find("resp_0") is None
        assert await store.find("resp_59") == record(59, MIB // 4)
        assert (await holds(server))[0] > 8
        await store.close()


async def test_where_others_have_filled_redis_responses_go_and_none_is_stored(url: str) -> None:
    async with full(url, 8 * MIB) as server:
        store = store_of(connect(url, 5))
        await store.store(record(1, MIB))
        used = (await server.info("memory"))["used_memory"]
        await server.config_set("maxmemory", used - 2 * MIB)
        await store.store(record(2))
        assert store.counts == StoreCounts(stored=1, not_stored=1)
        assert await store.find("resp_2") is None, "and Redis is not away"
        assert await holds(server) == (0, 0)
        await store.close()


async def test_in_the_embedded_redis_they_reach_their_own_limits(tmp_path: Path) -> None:
    """Though the registry has most of its share."""
    section = StoredResponsesSection(max_total_mib=16, max_responses=1000)
    server = EmbeddedRedis(tmp_path, most_mib=memory_mib(section))
    await server.start()
    try:
        client: Any = connect(server.url, 5)
        for part in range((REGISTRY_MIB - 32) // 4):
            await client.set(f"{{svc}}:registry-{part}", b"a" * (4 * MIB - 1024))
        store = StoredResponses(client, "svc", section)
        for number in range(30):
            # A little more than a size that the allocator has: it takes the next one, a quarter above.
            await store.store(record(number, MIB // 2 + 64))
        assert store.counts == StoreCounts(stored=30)
        assert (await holds(client))[0] == 30
        await store.close()
    finally:
        await server.stop()


# Away.


async def test_away_it_costs_no_answer_and_is_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    redis: Any = connect(f"redis://127.0.0.1:{hold_port('127.0.0.1')}/0", 5)
    now_s = 0.0
    store = store_of(redis, {"now_s": lambda: now_s})
    for number in range(3):
        await store.store(record(number))
    for asked in (store.find("resp_1"), store.delete("resp_1")):
        with pytest.raises(StoreAwayError):
            await asked
    assert store.counts == StoreCounts(not_stored=3)
    assert [each.message.startswith("responses are answered and not stored") for each in caplog.records] == [True]
    now_s = 1e9
    with pytest.raises(StoreAwayError):
        await store.find("resp_1")
    await store.close()


async def test_one_that_takes_a_call_and_says_nothing_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = store_of(connect(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", 60), {"timeout_s": 0.01})
        await store.store(record(1))
        assert store.counts == StoreCounts(not_stored=1)
        await store.close()


async def test_it_is_back(tmp_path: Path) -> None:
    with running_redis(tmp_path) as url:
        store = store_of(connect(url, 5), {"pause_s": 0.0})
        await store.store(record(1))
    await store.store(record(2))
    assert store.counts == StoreCounts(stored=1, not_stored=1)
    await store.close()
