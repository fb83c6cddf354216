"""One service as it comes, and one with little memory, which is also one that has not seen what the other was asked."""

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from rachis import AsyncClient

from cluster_core.ports import hold_port
from command_line.own_service import Target
from tests.fakes.collector import Collector, listening
from tests.integration import secured
from tests.integration.conftest import CHUNK_TOKENS, own_service, until

GATEWAY_START_S = 280.0
# Of the small service: blocks for about seven of the sessions that are open at once there, host memory for two.
MAX_BACKLOG_TOKENS = 256
SMALL: dict[str, Any] = {
    "engine__kv_blocks": 136,
    "tiers__host_gib": 0.005,
    "index__chunk_tokens": CHUNK_TOKENS,
    "streaming__max_backlog_tokens": MAX_BACKLOG_TOKENS,
    "streaming__progress_interval_ms": 0,
    # What is given back after one minute was not given back by the end of a lease.
    "handoff__deadline_s": 3,
    "handoff__lease_s": 600,
}


@pytest.fixture(scope="package")
def gateway_port() -> int:
    return hold_port("127.0.0.1")


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Of the traces whose callers want them, and of those that failed, migrated or were too slow."""
    with listening() as collector:
        yield collector


@pytest_asyncio.fixture(scope="package")
async def shared_service(
    tmp_path_factory: pytest.TempPathFactory, gateway_port: int, collector: Collector
) -> AsyncIterator[tuple[Target, AsyncClient]]:
    """With a gateway beside it, which comes up later, and a collector of traces."""
    options = ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags = {"gateway__port": gateway_port, "gateway__options": options}
    traced = {"tracing__otlp_endpoint": collector.url, "tracing__sample_rate": 0.0}
    async with own_service(tmp_path_factory.mktemp("service"), **flags, **traced) as running:
        yield running


@pytest_asyncio.fixture(scope="package")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Target, AsyncClient]]:
    """A service with few blocks, a small backlog and a short hand-off deadline, which tells of every progress."""
    async with own_service(tmp_path_factory.mktemp("small"), **SMALL) as running:
        yield running


@pytest.fixture
def client(shared_service: tuple[Target, AsyncClient]) -> AsyncClient:
    return shared_service[1]


@pytest.fixture
def target(shared_service: tuple[Target, AsyncClient]) -> Target:
    return shared_service[0]


@pytest_asyncio.fixture(scope="package")
async def gateway(shared_service: tuple[Target, AsyncClient], gateway_port: int) -> str:
    """The URL of the one that `rachis serve` has started."""
    url = f"{secured.SCHEME}://127.0.0.1:{gateway_port}"
    await until(functools.partial(_is_healthy, url), "the gateway serves", GATEWAY_START_S)
    return url


@pytest_asyncio.fixture
async def http(gateway: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway, headers=secured.headers(), timeout=120) as client:
        yield client


async def _is_healthy(url: str) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.HTTPError:
            return False
