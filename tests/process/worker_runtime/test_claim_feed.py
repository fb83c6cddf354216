"""The feed of claims on a real Redis, alone and as a cluster: what a follower reads is what the engine has."""

import asyncio
import random
import time
from typing import Any

import pytest
import redis.asyncio as redis

from cluster_configs.schema import IndexSection
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from cluster_core.errors import StartError, UnavailableError
from cluster_wire import registry
from cluster_wire.redis_client import connect
from tests.fakes.claims_reader import Read, read_claims
from tests.fakes.engine import FakeEngine
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
from worker_runtime import claim_feed
from worker_runtime.claim_feed import ClaimFeed


async def test_a_new_generation_begins_with_nothing(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1, 2))
        await reads(client, on_device(1, 2))
        # Others may read what Redis has before it has said so to the feed.
        await until(lambda: holds(lambda: feed.sequence == 1))
    feed = ClaimFeed(connect(server.url, 1.0), SERVICE, WORKER, 1001, INDEX)
    await feed.open()

    assert await read_claims(client, SERVICE, WORKER) == Read(1001, 0, PrefixClaims(), ())
    await feed.close()


async def test_changes_before_the_stream_is_opened_are_its_first_batch(server: Server, client: redis.Redis) -> None:
    feed = ClaimFeed(connect(server.url, 1.0), SERVICE, WORKER, 7, INDEX)
    feed.changed(PrefixClaimChange({1: True}, {2: True}))
    await feed.open()
    assert await read_claims(client, SERVICE, WORKER) == Read(7, 0, PrefixClaims(), ())
    task = asyncio.create_task(feed.keep())

    await reads(client, PrefixClaims(frozenset({1}), frozenset({2})))
    task.cancel()
    await feed.close()


async def test_many_changes_go_out_in_batches_of_bounded_size_and_snapshots_follow(
    server: Server, client: redis.Redis
) -> None:
    async with feeding(server) as feed:
        for start in (1, 100_001):
            feed.changed(device(*range(start, start + 50_000)))
            await reads(client, on_device(*range(1, 50_001), *(range(100_001, start + 50_000) if start > 1 else ())))
        await until(lambda: holds(lambda: feed.counters.snapshots >= 1))
        assert feed.counters.batches >= 14
        assert feed.counters.losses == 0
        read = await reads(client, on_device(*range(1, 50_001), *range(100_001, 150_001)))
        assert read.sequence == feed.sequence
        # Who is a little behind still finds the batches since the snapshot before.
        assert await client.xlen(registry.claims_key(SERVICE, WORKER)) > 0


async def test_keys_expire_some_time_after_the_worker(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
    for key in (registry.claims_key(SERVICE, WORKER), registry.snapshot_key(SERVICE, WORKER)):
        assert 500_000 < await client.pttl(key) <= 600_000


async def test_of_two_workers_with_one_id_the_older_falls_silent(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(server, 1000) as older, feeding(server, 2000) as newer:
        newer.changed(device(1))
        older.changed(device(2))
        await until(lambda: holds(lambda: older.is_superseded))
        older.changed(device(3))

        assert (await reads(client, on_device(1))).generation == 2000
        assert older.counters.superseded == 1
        assert older.waiting_keys() == 0
        assert "has taken over the id prefill-0" in caplog.text
        with pytest.raises(UnavailableError):
            await older.audit(FakeEngine())
    late = ClaimFeed(connect(server.url, 1.0), SERVICE, WORKER, 1500, INDEX)
    with pytest.raises(StartError):
        await late.open()
    await late.close()


async def test_claims_that_change_while_a_snapshot_is_made_are_a_batch_behind_it(
    server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The original, for the slow one below.
    encoded = claim_feed._encoded_snapshot
    stayed = []

    def slowly(generation: int, sequence: int, claims: list[list[int]]) -> bytes:
        before = list(claims[0])
        time.sleep(0.02)
        stayed.append(claims[0] == before)
        return encoded(generation, sequence, claims)

    # Slow enough for claims to change while a thread reads them.
    monkeypatch.setattr(claim_feed, "_encoded_snapshot", slowly)
    async with feeding(server, index=IndexSection(write_interval_s=0.001, snapshot_keys=1)) as feed:
        key = 0
        while key < 300 or feed.counters.snapshots < 3:
            feed.changed(device(key, gone=(key - 100,) if key >= 100 else ()))
            await asyncio.sleep(0.001)
            key += 1
        await reads(client, on_device(*range(key - 100, key)))
        assert feed.counters.losses == 0
    assert all(stayed)


async def test_an_audit_names_the_batch_after_which_just_that_is_believed(server: Server, client: redis.Redis) -> None:
    engine, rng = FakeEngine(chunk_tokens=8), random.Random(5)
    async with feeding(server) as feed:
        engine.follow_claims(feed.changed)
        for _ in range(30):
            prompt = tuple(rng.choices(range(3), k=rng.randrange(40)))
            if rng.random() < 0.7:
                engine.claims.cache(prompt)
            else:
                engine.claims.drop(prompt, first_block=rng.randrange(3))
            sequence, claims = await feed.audit(engine)
            engine.claims.cache((9, 9, 9, 9, rng.randrange(100), 9, 9, 9))
            await until(lambda expected=sequence: holds(lambda: feed.sequence >= expected))  # type: ignore[misc]
            assert await _believed_after(client, sequence) == claims
        assert feed.counters.losses == 0


async def _believed_after(client: redis.Redis, sequence: int) -> PrefixClaims:
    """Nothing is trimmed before the first snapshot."""
    from kv_transfer.claims.claims import decode_batch

    believed: set[int] = set()
    entries: Any = await client.xrange(registry.claims_key(SERVICE, WORKER), max=f"1000-{sequence}")
    for _, fields in entries:
        change = decode_batch(fields[b"b"]).change
        believed |= set(change.device_stored.tolist())
        believed -= set(change.device_removed.tolist())
    return on_device(*believed)
