"""A worker's registration in a real Redis: of two with one id the newer keeps the record, and generations grow."""

import asyncio
from typing import Any

import pytest
import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from cluster_wire import registry
from cluster_wire.redis_client import connect
from tests.process.worker_runtime.claim_feed_world import SERVICE, WORKER, Server, until
from worker_runtime.registration import Registration


def _registration(server: Server, **values: Any) -> Registration:
    record = wire.WorkerRegistration(worker_id=WORKER, **values)
    return Registration(connect(server.url, 5.0), SERVICE, record, 5.0)


async def _registered(client: redis.Redis) -> wire.WorkerRegistration:
    written: Any = await client.get(registry.worker_key(SERVICE, WORKER))
    return wire.WorkerRegistration.FromString(written)


async def test_a_superseded_worker_leaves_the_record_to_its_successor(server: Server, client: redis.Redis) -> None:
    record = wire.WorkerRegistration(worker_id=WORKER)
    redis_client = connect(server.url, 5.0)
    older = Registration(redis_client, SERVICE, record, 5.0, refresh=lambda: setattr(record, "stored_blocks", 9))
    await older.open()
    await older.publish()
    assert (await _registered(client)).stored_blocks == 9
    key = registry.worker_key(SERVICE, WORKER)
    await client.set(key, b"newer")

    older.superseded()
    await older.publish()
    await older.close()

    assert await client.get(key) == b"newer"


async def test_of_two_workers_with_one_id_the_newer_keeps_the_record(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = _registration(server, pid=1), _registration(server, pid=2)
    for each in (older, newer):
        await each.open()
        await each.publish()
    unaware = _registration(server, generation=older.record.generation)
    await unaware.close()
    assert (await _registered(client)).pid == 2
    for _ in range(3):
        await older.publish()
    assert (await _registered(client)).pid == 2
    assert caplog.text.count("another worker has registered as prefill-0") == 1
    await older.close()
    assert (await _registered(client)).pid == 2
    assert 0 < await client.pttl(registry.holder_key(SERVICE, WORKER)) <= 5000

    await newer.close()

    assert not await client.exists(registry.worker_key(SERVICE, WORKER), registry.holder_key(SERVICE, WORKER))


async def test_generations_go_by_redis_and_grow_though_it_lost_its_data(server: Server, client: redis.Redis) -> None:
    first, second = _registration(server), _registration(server)
    seconds, _ = await client.time()
    generation = await first.open()
    assert 0 <= generation - 1000 * seconds < 60_000
    await first.publish()
    ahead = generation + 3_600_000
    first.record.generation = ahead
    await client.flushall()
    await first.publish()

    assert await second.open() == ahead + 1
    for each in (first, second):
        await each.close()


async def test_a_registration_outlives_a_defect(server: Server, client: redis.Redis) -> None:
    failures = iter([ZeroDivisionError("of a test")])

    def refresh() -> None:
        for failure in failures:
            raise failure

    record = wire.WorkerRegistration(worker_id=WORKER)
    registration = Registration(connect(server.url, 10.0), SERVICE, record, 2.0, refresh)
    await registration.open()
    task = asyncio.create_task(registration.keep())

    async def is_there() -> bool:
        return bool(await client.exists(registry.worker_key(SERVICE, WORKER)))

    await until(is_there)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await registration.close()
