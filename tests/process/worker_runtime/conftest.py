"""A real Redis, alone and as a cluster, and a client of it, for the modules here that do not start one of their own."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as redis

from tests.process.worker_runtime.claim_feed_world import Server


@pytest.fixture(scope="module", params=["alone", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Shared, because a cluster takes two seconds to come up."""
    server = Server(tmp_path_factory.mktemp("redis"), cluster=request.param == "cluster")
    yield server
    server.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[redis.Redis]:
    client = await server.start()
    await client.flushall()
    yield client
    await client.aclose()
