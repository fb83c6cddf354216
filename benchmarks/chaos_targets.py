"""What a run of `rachis chaos` does its faults to: the processes of a service, its second router, and its Redis."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys

import grpc
import psutil
import redis.asyncio as redis

from benchmarks.chaos_schedule import Fault
from cluster_core.background import BackgroundTasks
from cluster_core.errors import StartError
from cluster_core.ports import hold_port
from control_plane.client import RachisClient
from control_plane.service.child_process import bind_to_parent
from control_plane.service.embedded_redis import EmbeddedRedis

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 120.0
_STARTS = 3


class SecondRouter:
    """`rachis route`, started again where it was killed, on the same port."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self.address = f"{_HOST}:{hold_port(_HOST)}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises StartError where it does not listen."""
        port = self.address.rpartition(":")[2]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "command_line.main", "route", "--json", *self._arguments,
            "--set", f"router.port={port}", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, preexec_fn=bind_to_parent,
        )  # fmt: skip
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await self.process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line or json.loads(line).get("event") != "listening":
            raise StartError("the second router did not start")

    async def ended(self) -> None:
        """What is left of a start is ended as well."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.communicate()


class Targets:
    """Redis is started again by whoever keeps it. done: faults as they were inflicted, by kind and target."""

    def __init__(self, service_pid: int, client: RachisClient, own_redis: EmbeddedRedis, router: SecondRouter) -> None:
        self._service_pid = service_pid
        self._client = client
        self._redis = own_redis
        self._router = router
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
        if fault.target == "router":
            self._starting.start(self._start_router_again())

    async def _start_router_again(self) -> None:
        """As whoever keeps it would: on a starved machine one start may take too long."""
        for _ in range(_STARTS):
            await asyncio.sleep(1.0)
            await self._router.ended()
            with contextlib.suppress(StartError):
                await self._router.start()
                return
        logger.error("the second router did not start again")

    async def _flush(self) -> None:
        async with redis.Redis.from_url(self._redis.url, socket_timeout=5.0) as client:
            with contextlib.suppress(redis.RedisError):
                await client.flushall()

    async def _pid(self, fault: Fault) -> int | None:
        match fault.target:
            case "service":
                return self._service_pid
            case "router":
                return self._router.process.pid if self._router.process is not None else None
            case "redis":
                return self._redis.pid or None
        try:
            workers = [view.registration for view in await self._client.workers()]
        except grpc.aio.AioRpcError:
            return None
        return next((each.pid for each in workers if each.worker_id == f"{fault.target}-{fault.number}"), None)
