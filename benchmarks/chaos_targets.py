"""What a run of `rachis chaos` does its faults to: workers, `rachis serve`, the second router, and Redis's primary."""

import asyncio
import contextlib
import logging
import os
import signal

import grpc
import psutil
from rachis import AsyncClient

from benchmarks.chaos_schedule import Fault
from benchmarks.kept_command import KeptCommand
from benchmarks.replicated_redis import ReplicatedRedis
from cluster_core.background import BackgroundTasks
from cluster_core.errors import StartError
from cluster_wire.redis_client import REDIS_DOWN, connect

logger = logging.getLogger(__name__)

_STARTS = 3


class Targets:
    """Redis is started again by whoever keeps it. done: faults as they were inflicted, by kind and target."""

    def __init__(
        self, service: KeptCommand, router: KeptCommand, client: AsyncClient, own_redis: ReplicatedRedis
    ) -> None:
        """client: of both routers."""
        self._commands = {"service": service, "router": router}
        self._client = client
        self._redis = own_redis
        self._starting = BackgroundTasks()
        self.done: dict[str, int] = {}

    async def inflict(self, fault: Fault) -> None:
        """From its beginning to its end; what cannot be found, because it is being started, is spared."""
        name = f"{fault.kind} {fault.target}"
        if fault.kind == "flush":
            await self._flush()
        else:
            pid = await self._pid(fault)
            if pid is None or not psutil.pid_exists(pid):
                return
            if fault.kind == "kill":
                self._kill(fault, pid)
            else:
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(fault.for_s)
                finally:
                    os.kill(pid, signal.SIGCONT)
        self.done[name] = self.done.get(name, 0) + 1

    def _kill(self, fault: Fault, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        if fault.target in self._commands:
            self._starting.start(self._start_again(fault.target))

    async def _start_again(self, target: str) -> None:
        """As whoever keeps it would: on a starved machine one start may take too long."""
        command = self._commands[target]
        for _ in range(_STARTS):
            await asyncio.sleep(1.0)
            await command.killed()
            with contextlib.suppress(StartError):
                await command.start()
                return
        logger.error("the %s did not start again", target)

    async def _flush(self) -> None:
        client = connect(self._redis.url, 5.0)
        with contextlib.suppress(*REDIS_DOWN):
            await client.flushall()
        await client.aclose()

    async def _pid(self, fault: Fault) -> int | None:
        if fault.target in self._commands:
            process = self._commands[fault.target].process
            return process.pid if process is not None and process.returncode is None else None
        if fault.target == "redis":
            return await self._redis.primary_pid()
        try:
            workers = [view.registration for view in await self._client.workers()]
        except grpc.aio.AioRpcError:
            return None
        return next((each.pid for each in workers if each.worker_id == f"{fault.target}-{fault.number}"), None)
