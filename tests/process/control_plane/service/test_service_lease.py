"""One `rachis serve` for each name of a service on one Redis, single or a cluster."""

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
import redis.asyncio as redis

from cluster_core.errors import StartError
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient, connect
from control_plane.service.lease import ServiceLease
from tests.fakes.redis_server import running_redis

# Long enough for a machine that is busy: it is renewed four times in it.
LEASE_S = 2.0
KEY = registry.lease_key("chat")


@pytest.fixture(scope="module", params=[False, True], ids=["server", "cluster"])
def url(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis"), is_cluster=request.param) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    client = connect(url, 2.0)
    await client.flushall()
    yield client
    await client.aclose()


class Away:
    """A client of a Redis that does not answer while `failures` last."""

    def __init__(self, client: Any) -> None:
        self.failures: list[Exception] = []
        self._client = client

    async def eval(self, *arguments: Any) -> Any:
        if self.failures:
            raise self.failures.pop()
        return await self._client.eval(*arguments)

    async def aclose(self) -> None:
        await self._client.aclose()


def lease_of(name: str, url: str) -> ServiceLease:
    return ServiceLease(connect(url, 2.0), url, name, lease_s=LEASE_S)


async def keeping(lease: ServiceLease) -> "asyncio.Task[None]":
    await lease.take()
    return asyncio.create_task(lease.keep())


async def eventually(holds: Callable[[], Awaitable[object]]) -> None:
    """Returns once it is so."""
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110 - what is waited for lies in Redis
            await asyncio.sleep(0.02)


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_second_service_of_the_same_name_is_refused_and_another_name_is_not(url: str, client: Any) -> None:
    first = lease_of("chat", url)
    keeper = await keeping(first)
    second, other = lease_of("chat", url), lease_of("code", url)
    with pytest.raises(StartError) as refusal:
        await second.take()
    await other.take()

    holder = f"service chat already runs on {re.escape(socket.gethostname())} \\(process {os.getpid()}, since .*\\)"
    assert re.match(rf"service\.name: {holder} on the Redis at {re.escape(url)}; stop that one, or", str(refusal.value))
    await ended(keeper)
    await first.give_back()
    await second.take()
    for lease in (second, other):
        await lease.give_back()
    assert not await client.exists(KEY)


async def test_one_that_died_without_a_word_is_waited_for(url: str, client: Any) -> None:
    dead = lease_of("chat", url)
    await dead.take()
    successor = lease_of("chat", url)
    await successor.take()

    await dead.give_back()
    assert await client.exists(KEY), "what is another one's is not given back"
    await successor.give_back()


async def test_the_name_stays_while_it_is_renewed_and_comes_back_to_a_redis_that_lost_it(url: str, client: Any) -> None:
    lease = lease_of("chat", url)
    keeper = await keeping(lease)
    await asyncio.sleep(1.5 * LEASE_S)
    assert await client.exists(KEY)
    await client.delete(KEY)
    await eventually(lambda: client.exists(KEY))
    await ended(keeper)
    await lease.give_back()


async def test_a_redis_that_is_away_ends_nothing_and_is_said_once(
    url: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    away = Away(connect(url, 2.0))
    lease = ServiceLease(cast(RedisClient, away), url, "chat", lease_s=LEASE_S)
    keeper = await keeping(lease)
    away.failures += [redis.ConnectionError("away"), redis.TimeoutError("away")]

    async def is_renewed_again() -> bool:
        return "renewed again" in caplog.text

    await eventually(is_renewed_again)
    assert not away.failures and not keeper.done()
    assert await client.exists(KEY)
    said = [record.getMessage() for record in caplog.records if "renewed" in record.getMessage()]
    assert said == [
        "the name of the service could not be renewed, it is tried again: away",
        "the name of the service is renewed again",
    ]
    await ended(keeper)
    await lease.give_back()


async def test_one_that_died_on_this_machine_is_not_waited_for(url: str, client: Any) -> None:
    """Its lease would last for a minute; who lives is not taken from."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _TAKES, url)
    assert await process.wait() == 0
    first, second = (ServiceLease(connect(url, 2.0), url, "chat", lease_s=LEASE_S) for _ in range(2))
    left_ms = await client.pttl(KEY)
    await first.take()
    assert left_ms > 50_000 and await client.pttl(KEY) <= 1000 * LEASE_S
    keeper = await keeping(first)
    with pytest.raises(StartError, match="already runs"):
        await second.take()
    await ended(keeper)
    for lease in (first, second):
        await lease.give_back()


_TAKES = """
import asyncio, sys
from cluster_wire.redis_client import connect
from control_plane.service.lease import ServiceLease
asyncio.run(ServiceLease(connect(sys.argv[1], 2.0), sys.argv[1], "chat", lease_s=60.0).take())
"""


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "elsewhere"},
        {"machine": ""},
        {"process_began": None},
        {"process_began": 0},
        {"pid": "x"},
        {"pid": os.getpid()},
    ],
)
async def test_one_of_another_machine_or_that_says_too_little_is_waited_for(
    url: str, client: Any, other: dict[str, Any]
) -> None:
    lease = lease_of("chat", url)
    await lease.take()
    value = json.loads(await client.get(KEY)) | ({"pid": 4_194_304} if "machine" in other else {}) | other
    await client.set(KEY, json.dumps(value), px=60_000)
    successor = ServiceLease(connect(url, 2.0), url, "chat", lease_s=0.2)
    with pytest.raises(StartError, match="already runs"):
        await successor.take()
    for each in (lease, successor):
        await each.give_back()


async def test_a_name_that_somebody_else_has_taken_meanwhile_is_lost_and_told_once(
    url: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lease = lease_of("chat", url)
    keeper = await keeping(lease)
    value = json.dumps({"host": "node-b", "pid": 7, "since_ms": 0})
    await client.set(KEY, value)

    async def is_said() -> bool:
        return "node-b" in caplog.text

    await eventually(is_said)
    # Once only, however often it is renewed after that.
    await asyncio.sleep(LEASE_S)
    await ended(keeper)
    await lease.give_back()

    told = [record.getMessage() for record in caplog.records if "node-b" in record.getMessage()]
    assert told == [
        "service chat already runs on node-b (process 7, since 1970-01-01 00:00:00+00:00): this one has lost its name"
    ]
    assert lease.lost.is_set()
    assert (await client.get(KEY)).decode() == value


async def test_one_that_was_held_up_while_it_started_finds_its_name_lost(url: str, client: Any) -> None:
    lease = lease_of("chat", url)
    await lease.take()
    await lease.check()
    await client.set(KEY, json.dumps({"host": "node-b", "pid": 7, "since_ms": 0}))
    with pytest.raises(StartError, match=r"service\.name: service chat already runs on node-b .* by now"):
        await lease.check()
    assert lease.lost.is_set()
    await lease.give_back()


async def test_whose_the_name_is_is_asked_where_the_loop_has_not_heard_of_it_yet(url: str, client: Any) -> None:
    """It was held up for longer than its lease, and is told to stop before it renews."""
    lease = lease_of("chat", url)
    await lease.take()
    assert await lease.is_ours()
    await client.delete(KEY)
    assert await lease.is_ours(), "nobody has taken it, and now nobody can"
    await client.set(KEY, json.dumps({"host": "node-b", "pid": 7, "since_ms": 0}))
    assert not lease.lost.is_set()
    assert not await lease.is_ours()
    assert lease.lost.is_set()
    await lease.give_back()


@pytest.mark.parametrize(("lease_s", "is_ours"), [(60.0, True), (0.2, False)])
async def test_where_redis_is_silent_the_name_is_ours_for_as_long_as_it_was_renewed(
    url: str, client: Any, lease_s: float, is_ours: bool
) -> None:
    away = Away(connect(url, 2.0))
    lease = ServiceLease(cast(RedisClient, away), url, "chat", lease_s=lease_s)
    await lease.take()
    await asyncio.sleep(0.3)
    away.failures.append(redis.ConnectionError("away"))
    assert await lease.is_ours() is is_ours
    assert not lease.lost.is_set()
    await lease.give_back()


async def test_a_redis_that_does_not_answer_is_told_without_its_password() -> None:
    lease = lease_of("chat", "redis://:secret@127.0.0.1:1/0")
    with pytest.raises(StartError, match=r"^redis\.url: the Redis at redis://:\*\*\*@127\.0\.0\.1:1/0 does not answer"):
        await lease.take()
    await lease.give_back()
