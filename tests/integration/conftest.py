"""One real service for the tests that share it, and the parts that start others of their own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster_configs.loading import LoadedConfig, load
from command_line.own_service import Target, target_service
from control_plane.client import RachisClient
from control_plane.service.state import StateFile

pytestmark = pytest.mark.integration

EVENT_TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def own_service(folder: Path, **flags: Any) -> AsyncIterator[tuple[Target, RachisClient]]:
    """A service with flags of its own; `a__b=1` sets `a.b`. Requests go through both pools unless told not to."""
    given = {name.replace("__", "."): value for name, value in flags.items()}
    loaded = load(flags={"placement.disaggregation": "always", **given})
    async with (
        target_service(None, StateFile(folder), loaded, always_own=True) as target,
        RachisClient(target.address) as client,
    ):
        yield target, client


async def until(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = EVENT_TIMEOUT_S) -> Any:
    """The first true answer of `condition`, asked again and again for a bounded time."""
    pause = asyncio.Event()
    try:
        async with asyncio.timeout(timeout_s):
            while not (answer := await condition()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pause.wait(), 0.05)
            return answer
    except TimeoutError:
        raise AssertionError(f"after {timeout_s:g} s still not: {what}") from None


async def all_blocks_free(client: RachisClient) -> bool:
    """No worker runs, waits for, leases or holds anything: free + held + cached = total, and nothing is held."""
    views = await client.workers()
    return all(
        view.load.total_blocks > 0
        and view.load.free_blocks == view.load.total_blocks
        and view.load.free_host_blocks == view.load.total_host_blocks
        and not (view.load.running_requests or view.load.waiting_requests or view.load.leased_handoffs)
        and not view.load.open_sessions
        for view in views
    )


@pytest.fixture(scope="session")
def loaded() -> LoadedConfig:
    return load()


@pytest_asyncio.fixture(scope="session")
async def shared_service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Target, RachisClient]]:
    async with own_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(shared_service: tuple[Target, RachisClient]) -> RachisClient:
    return shared_service[1]


@pytest.fixture
def target(shared_service: tuple[Target, RachisClient]) -> Target:
    return shared_service[0]
