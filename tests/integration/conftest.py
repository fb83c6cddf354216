"""Services of the tests' own, and what is waited for there.

The modules of a folder here share its services: they run on one worker, and the services end with the last of them.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rachis import AsyncClient
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig, load
from cluster_core.errors import StartError
from command_line.own_service import Target, target_service
from control_plane.service.state import StateFile
from tests.integration import secured
from worker_runtime.preloaded_python import JOB_VARIABLE, job_config, preloaded_python

EVENT_TIMEOUT_S = 180.0
WORKER_TIMEOUT_S = 120.0
CHUNK_TOKENS = 64
secured.use()


def keys_of(flags: dict[str, Any]) -> dict[str, Any]:
    """`a__b=1` sets `a.b`."""
    return {name.replace("__", "."): value for name, value in flags.items()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some wait for several starts of an engine, each of which takes a minute on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@contextlib.asynccontextmanager
async def own_service(folder: Path, **flags: Any) -> AsyncIterator[tuple[Target, AsyncClient]]:
    """A service with flags of its own; `a__b=1` sets `a.b`. Requests go through both pools unless told not to, and on a
    busy machine they wait for what has to start first, as the process that compiles grammars has."""
    unasked = {"placement.disaggregation": "always", "router.queue_timeout_s": 120}
    loaded = load(flags={**unasked, **secured.settings(), **keys_of(flags)})
    async with contextlib.AsyncExitStack() as stack:
        target = await _started(stack, lambda: target_service(None, StateFile(folder), loaded, always_own=True))
        yield target, await stack.enter_async_context(AsyncClient(target.address))


_STARTS = 3
_REDIS_WAS_LATE = "does not answer (Timeout connecting to server)"


async def _started(
    stack: contextlib.AsyncExitStack, service: Callable[[], contextlib.AbstractAsyncContextManager[Target]]
) -> Target:
    """Where Redis was late, another service is started."""
    for _ in range(_STARTS - 1):
        try:
            return await stack.enter_async_context(service())
        except StartError as error:
            if _REDIS_WAS_LATE not in str(error):
                raise
    return await stack.enter_async_context(service())


@pytest.fixture(scope="session", autouse=True)
def _preloaded_python() -> Iterator[None]:
    """Workers, gateways and what else loads vLLM are forked from a process that has, also those of `rachis serve`."""
    with preloaded_python("tests.loaded_engine") as command:
        os.environ.update(job_config(command))
        yield
        del os.environ[JOB_VARIABLE]


async def until(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = EVENT_TIMEOUT_S) -> Any:
    """The first true answer of `condition`, asked again and again for a bounded time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            # A condition may swallow the cancellation: redis-py does.
            while loop.time() < end_s:
                if answer := await condition():
                    return answer
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    raise AssertionError(f"after {timeout_s:g} s still not: {what}")


async def all_blocks_free(client: AsyncClient) -> bool:
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


async def worker_of(client: AsyncClient, worker_id: str) -> tuple[int, int]:
    """(process, generation)"""
    record = next(view.registration for view in await client.workers() if view.registration.worker_id == worker_id)
    return record.pid, record.generation


async def came_back(client: AsyncClient, worker_id: str, before: int) -> None:
    """Waits until a later generation of the worker serves."""

    async def serves() -> bool:
        try:
            views = await client.workers()
        except grpc.aio.AioRpcError:
            # On a busy machine the router may not have heard of all of them in time.
            return False
        return any(
            view.registration.generation > before
            and view.registration.state == wire.WORKER_STATE_READY
            and view.load.total_blocks > 0
            for view in views
            if view.registration.worker_id == worker_id
        )

    await until(serves, f"{worker_id} is back", WORKER_TIMEOUT_S)


@pytest.fixture(scope="session")
def loaded() -> LoadedConfig:
    return load()
