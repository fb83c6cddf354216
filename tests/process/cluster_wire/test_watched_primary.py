"""A primary that sentinels watch: its client finds it, and the one that takes over when it is killed."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from benchmarks.replicated_redis import ReplicatedRedis, replicated_redis
from cluster_configs.loading import masked
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, connect
from control_plane.service.lease import ServiceLease
from worker_runtime.registration import Registration


@pytest_asyncio.fixture
async def servers(tmp_path: Path) -> AsyncIterator[ReplicatedRedis]:
    async with replicated_redis(tmp_path) as servers:
        yield servers


async def eventually(holds: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(240):
        while not await holds():  # noqa: ASYNC110 - what is waited for lies in Redis
            await asyncio.sleep(0.05)


async def answer(question: Callable[[], Awaitable[Any]]) -> Any:
    """Once Redis gives one: on a busy machine the sentinels may take the new primary for dead, too."""
    answers: list[Any] = []

    async def given() -> bool:
        with contextlib.suppress(*REDIS_DOWN):
            answers.append(await question())
        return bool(answers)

    await eventually(given)
    return answers[0]


async def test_a_lease_and_a_registration_outlive_the_primary_and_nothing_goes_back(servers: ReplicatedRedis) -> None:
    lease = ServiceLease(connect(servers.url, 1.0), servers.url, "chat", lease_s=30.0)
    await lease.take()
    record = wire.WorkerRegistration(worker_id="decode-0", state=wire.WORKER_STATE_READY)
    worker = Registration(connect(servers.url, 1.0), "chat", record, lease_s=2.0)
    first = await answer(worker.open)
    keeping = asyncio.create_task(worker.keep())
    client = connect(servers.url, 1.0)
    await answer(lambda: client.wait(1, 2000))
    before = await servers.primary_pid()
    assert before is not None

    os.kill(before, signal.SIGKILL)

    async def taken_over() -> bool:
        return await servers.primary_pid() not in (None, before)

    async def registered() -> bool:
        try:
            return bool(await client.exists(registry.worker_key("chat", "decode-0")))
        except REDIS_DOWN:
            return False

    await eventually(taken_over)
    await eventually(registered)
    holder = json.loads(await answer(lambda: client.get(registry.lease_key("chat"))))
    assert holder["pid"] == os.getpid() and not lease.lost.is_set()
    again = Registration(connect(servers.url, 1.0), "chat", record, lease_s=2.0)
    assert await answer(again.open) > first
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    for closing in (worker.close, again.close, lease.give_back, client.aclose):
        await closing()


async def test_what_was_killed_comes_back_as_a_replica_and_may_take_over_in_turn(servers: ReplicatedRedis) -> None:
    client = connect(servers.url, 1.0)

    async def is_whole() -> bool:
        try:
            figures = await client.info("replication")
        except REDIS_DOWN:
            return False
        return figures["role"] == "master" and figures.get("connected_slaves") == 1

    for number in range(2):
        await eventually(is_whole)
        await answer(partial(client.set, "number", number))
        await answer(lambda: client.wait(1, 2000))
        before = await servers.primary_pid()
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await eventually(is_whole)
        assert await servers.primary_pid() != before
        assert await answer(lambda: client.get("number")) == str(number).encode()
    await client.aclose()


async def test_a_script_that_meets_a_replica_leaves_it_for_the_primary(servers: ReplicatedRedis) -> None:
    """Without a word to those that are connected: a server that somebody has made a replica by hand."""
    client: Any = connect(servers.url, 1.0)
    write = "return redis.call('SET', 'a', ARGV[1])"
    await client.eval(write, 0, "before")
    with pytest.raises(redis.ResponseError, match="script"):
        await client.eval("return redis.call('SET')", 0)
    replica = (await client.info("replication"))["slave0"]
    await client.execute_command("REPLICAOF", replica["ip"], replica["port"])

    with pytest.raises(redis.ConnectionError, match="the primary is a replica now"):
        await client.eval(write, 0, "meanwhile")
    await client.aclose()


async def test_one_dead_sentinel_is_asked_once_and_several_that_connect_at_once_lose_none(
    servers: ReplicatedRedis,
) -> None:
    asked: list[asyncio.StreamWriter] = []

    def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.close()

    dead = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = dead.sockets[0].getsockname()[1]
    client: Any = connect(servers.url.replace("@", f"@127.0.0.1:{port},"), 1.0)
    known = _sentinels_of(client)
    assert known[0] == port and len(set(known)) == 4

    await asyncio.gather(*(client.blpop("nothing", 0.2) for _ in range(8)))

    assert sorted(_sentinels_of(client)) == sorted(known)
    assert len(asked) == 1, "whoever has answered is asked first from then on"
    await client.aclose()
    dead.close()
    await dead.wait_closed()


async def test_sentinels_that_do_not_answer_are_a_redis_that_is_down() -> None:
    client = connect("redis+sentinel://127.0.0.1:1,127.0.0.1:2/primary", 0.5)
    with pytest.raises(REDIS_DOWN):
        await client.ping()
    await client.aclose()


@pytest.mark.parametrize("url", ["redis+sentinel://host:1", "redis+sentinel:///name", "redis+sentinel://h/name/x"])
def test_a_url_that_names_no_sentinel_or_no_primary_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis\+sentinel:// wants"):
        connect(url, 1.0)


def test_its_password_is_masked() -> None:
    assert masked("redis+sentinel://:secret@a:1,b:2/name/0") == "redis+sentinel://:***@a:1,b:2/name/0"


def _sentinels_of(client: Any) -> list[int]:
    """The ports that it knows, in its order."""
    manager = client.connection_pool.sentinel_manager
    return [each.connection_pool.connection_kwargs["port"] for each in manager.sentinels]
