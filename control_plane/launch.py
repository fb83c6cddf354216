"""The composition root: one service from one configuration, brought up and taken down in order.

up:    embedded Redis -> Ray -> placement groups, workers -> router (NOT_SERVING while they start) -> SERVING
down:  router drains -> workers -> Ray -> Redis -> what is left (control_plane.reaper, also when this is killed)
"""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig
from cluster_core import ids
from cluster_core.errors import StartError
from control_plane import reaper
from control_plane.controller import Controller
from control_plane.embedded_redis import EmbeddedRedis
from control_plane.server import RouterServer
from control_plane.service_state import SERVICE_VARIABLE, ServiceState, StateFile

_PROGRESS_EVERY_S = 0.2

OnPhase = Callable[[str, str], None]


class Service:
    """A running service: where its router listens, and what serves it."""

    def __init__(self, service_id: str, router: RouterServer, workers: list[wire.WorkerRegistration]) -> None:
        self.service_id = service_id
        self.router = router
        self.workers = workers

    @property
    def address(self) -> str:
        return self.router.address


@asynccontextmanager
async def running_service(loaded: LoadedConfig, state_file: StateFile, on_phase: OnPhase) -> AsyncIterator[Service]:
    """The service of a configuration, up inside the block and gone after it, whatever ends the block.

    `on_phase(part, phase)` hears what each part is doing. Raises StartError, with everything taken down again.
    """
    service_id = ids.new_service_id()
    # Inherited by every process that this one starts.
    os.environ[SERVICE_VARIABLE] = service_id
    async with AsyncExitStack() as stack:
        stack.callback(os.environ.pop, SERVICE_VARIABLE, None)
        stack.push_async_callback(asyncio.to_thread, reaper.dismiss, reaper.start(service_id))
        process = psutil.Process()
        state_file.claim(ServiceState(service_id, "", process.pid, process.create_time()))
        stack.callback(state_file.clear, process.pid)
        _check_port_free(loaded)
        folder = Path(tempfile.mkdtemp(prefix="rachis-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        redis_url = loaded.config.redis.url or await _embedded_redis(stack, folder, on_phase)
        controller = _connected_controller(loaded, service_id, redis_url, stack, on_phase)
        await controller.start_workers()
        on_phase("router", "starting")
        router = RouterServer(loaded, service_id, redis_url)
        await router.start()
        stack.push_async_callback(router.stop)
        state_file.claim(ServiceState(service_id, router.address, process.pid, process.create_time()))
        on_phase("router", f"listening on {router.address}")
        workers = await _workers_up(loaded, controller, router, on_phase)
        yield Service(service_id, router, workers)
        on_phase("service", "stopping")


def _check_port_free(loaded: LoadedConfig) -> None:
    """Before anything slow is started. Raises StartError."""
    host, port = loaded.config.router.host, loaded.config.router.port
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}", field="router.port") from None


async def _embedded_redis(stack: AsyncExitStack, folder: Path, on_phase: OnPhase) -> str:
    on_phase("redis", "starting")
    server = EmbeddedRedis(folder)
    stack.push_async_callback(server.stop)
    await server.start()
    keeper = asyncio.create_task(server.keep())
    stack.callback(keeper.cancel)
    on_phase("redis", "serving")
    return server.url


def _connected_controller(
    loaded: LoadedConfig, service_id: str, redis_url: str, stack: AsyncExitStack, on_phase: OnPhase
) -> Controller:
    on_phase("ray", "starting")
    controller = Controller(loaded.config, service_id, redis_url)
    stack.push_async_callback(controller.stop)
    controller.connect()
    on_phase("ray", "running")
    return controller


async def _workers_up(
    loaded: LoadedConfig, controller: Controller, router: RouterServer, on_phase: OnPhase
) -> list[wire.WorkerRegistration]:
    reporter = asyncio.create_task(_report_workers(router, on_phase))
    try:
        workers = await controller.wait_ready()
        await _until_usable(router, len(workers), loaded.config.limits.start_timeout_s)
        return workers
    finally:
        reporter.cancel()


async def _report_workers(router: RouterServer, on_phase: OnPhase) -> None:
    while True:
        for member in router.membership.members():
            on_phase(member.worker_id, member.registration.phase)
        await asyncio.sleep(_PROGRESS_EVERY_S)


async def _until_usable(router: RouterServer, workers: int, timeout_s: float) -> None:
    """Workers serve before the router has read so from the registry."""
    try:
        await router.wait_usable(workers, timeout_s)
    except TimeoutError:
        raise StartError("the workers serve but the router does not see them in the registry") from None
