"""One service with two workers of each pool."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin

from tests.fakes.redis_server import RestartedRedis
from tests.integration.conftest import CHUNK_TOKENS, keys_of, own_service, until

TWO_BY_TWO: dict[str, Any] = {
    "pools__prefill__workers": 2,
    "pools__decode__workers": 2,
    "pools__prefill__cpus_per_worker": 0.25,
    "pools__decode__cpus_per_worker": 0.25,
    "limits__session_grace_s": 0.2,
    # Beside much other work a worker that is well may not renew its registration for seconds: who dies here is killed.
    "redis__worker_lease_s": 10,
    "index__chunk_tokens": CHUNK_TOKENS,
}


@dataclass(frozen=True, slots=True)
class TwoByTwo:
    """Two prefill and two decode workers, which register in a Redis that the service did not start."""

    client: AsyncClient
    redis: RestartedRedis
    name: str

    @contextlib.asynccontextmanager
    async def another_router(self, **flags: Any) -> AsyncIterator[AsyncClient]:
        """A router with flags of its own, which finds the workers by itself and must end by itself."""
        settings = {"service.name": self.name, "redis.url": self.redis.url, "router.port": 0, **keys_of(flags)}
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "command_line.main", "route", "--json", *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            listening = json.loads(await process.stdout.readline())
            async with AsyncClient(listening["address"]) as client:
                workers = len(await self.client.workers())
                await until(lambda: _knows(client, workers), "another router knows the workers")
                yield client
        finally:
            process.terminate()
            output, _ = await process.communicate()
        assert (process.returncode, json.loads(output.splitlines()[-1])) == (0, {"event": "stopped"})


@pytest_asyncio.fixture(scope="package")
async def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoByTwo]:
    """Tests may kill its workers, and wait until they are back."""
    folder, name = tmp_path_factory.mktemp("two-by-two"), "chat"
    outside = RestartedRedis(folder)
    try:
        flags = {**TWO_BY_TWO, "service__name": name, "redis__url": outside.url}
        async with own_service(folder, **flags) as (_, client):
            yield TwoByTwo(client, outside, name)
    finally:
        outside.stop()


@contextlib.asynccontextmanager
async def losing(client: AsyncClient, prefill: int, decode: int) -> AsyncIterator[None]:
    """So many workers die by themselves meanwhile. The service has counted them when the block has ended."""
    before = await lost(client)
    yield

    async def counted() -> bool:
        return await lost(client) == [before[0] + prefill, before[1] + decode]

    await until(counted, "the lost workers are counted")


async def lost(client: AsyncClient) -> list[int]:
    """Workers whose process has ended by itself, by pool."""
    return [pool.lost_workers for pool in (await client.admin.GetPools(admin.GetPoolsRequest())).pools]


async def _knows(client: AsyncClient, workers: int) -> bool:
    return len(await client.workers()) == workers
