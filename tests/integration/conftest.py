"""The real services that tests share, and the parts that start others of their own.

Modules that share a service are in one group of `xdist_group`, so that it is started once.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig, load
from command_line.own_service import Target, target_service
from control_plane.client import RachisClient
from control_plane.service.state import StateFile
from tests.fakes.redis_server import RestartedRedis

EVENT_TIMEOUT_S = 60.0
WORKER_TIMEOUT_S = 120.0

# Of the small service: blocks for about seven of the sessions that are open at once there, host memory for two.
MAX_BACKLOG_TOKENS = 256
CHUNK_TOKENS = 64
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
TWO_BY_TWO: dict[str, Any] = {
    "pools__prefill__workers": 2,
    "pools__decode__workers": 2,
    "pools__prefill__cpus_per_worker": 0.25,
    "pools__decode__cpus_per_worker": 0.25,
    "limits__session_grace_s": 0.2,
    "index__chunk_tokens": CHUNK_TOKENS,
}


@dataclass(frozen=True, slots=True)
class TwoByTwo:
    """Two prefill and two decode workers, which register in a Redis that the service did not start."""

    client: RachisClient
    redis: RestartedRedis
    name: str

    @contextlib.asynccontextmanager
    async def another_router(self, **flags: Any) -> AsyncIterator[RachisClient]:
        """A router with flags of its own, which finds the workers by itself and must end by itself."""
        settings = {"service.name": self.name, "redis.url": self.redis.url, "router.port": 0, **_keys(flags)}
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "command_line.main", "route", "--json", *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            listening = json.loads(await process.stdout.readline())
            async with RachisClient(listening["address"]) as client:
                workers = len(await self.client.workers())
                await until(lambda: _knows(client, workers), "another router knows the workers")
                yield client
        finally:
            process.terminate()
            output, _ = await process.communicate()
        assert (process.returncode, json.loads(output.splitlines()[-1])) == (0, {"event": "stopped"})


async def _knows(client: RachisClient, workers: int) -> bool:
    return len(await client.workers()) == workers


def _keys(flags: dict[str, Any]) -> dict[str, Any]:
    """`a__b=1` sets `a.b`."""
    return {name.replace("__", "."): value for name, value in flags.items()}


@contextlib.asynccontextmanager
async def own_service(folder: Path, **flags: Any) -> AsyncIterator[tuple[Target, RachisClient]]:
    """A service with flags of its own; `a__b=1` sets `a.b`. Requests go through both pools unless told not to."""
    loaded = load(flags={"placement.disaggregation": "always", **_keys(flags)})
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


async def worker_of(client: RachisClient, worker_id: str) -> tuple[int, int]:
    """(process, generation)"""
    record = next(view.registration for view in await client.workers() if view.registration.worker_id == worker_id)
    return record.pid, record.generation


async def came_back(client: RachisClient, worker_id: str, before: int) -> None:
    """Waits until a later generation of the worker serves."""

    async def serves() -> bool:
        return any(
            view.registration.generation > before
            and view.registration.state == wire.WORKER_STATE_READY
            and view.load.total_blocks > 0
            for view in await client.workers()
            if view.registration.worker_id == worker_id
        )

    await until(serves, f"{worker_id} is back", WORKER_TIMEOUT_S)


@pytest.fixture(scope="session")
def loaded() -> LoadedConfig:
    return load()


@pytest_asyncio.fixture(scope="session")
async def shared_service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Target, RachisClient]]:
    async with own_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest_asyncio.fixture(scope="session")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Target, RachisClient]]:
    """A service with few blocks, a small backlog and a short hand-off deadline, which tells of every progress."""
    async with own_service(tmp_path_factory.mktemp("small"), **SMALL) as running:
        yield running


@pytest_asyncio.fixture(scope="session")
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


@pytest.fixture
def client(shared_service: tuple[Target, RachisClient]) -> RachisClient:
    return shared_service[1]


@pytest.fixture
def target(shared_service: tuple[Target, RachisClient]) -> Target:
    return shared_service[0]
