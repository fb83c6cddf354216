"""The composition root: one service from one configuration, brought up and taken down in order.

up:    Ray -> embedded Redis -> lease of the name -> workers of a former start, or preflight of the nodes
       -> router (NOT_SERVING while workers start) -> workers -> SERVING -> adapters -> gateways
down:  gateways -> router drains -> workers -> Redis -> Ray -> what is left
       (control_plane.service.reaper, also when this is killed)

Workers of a named service on a Ray that it joins may stay where this ends; see `control_plane.service.workers_end`.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.exposure import check_exposure
from cluster_configs.loading import LoadedConfig
from cluster_configs.schema import RachisConfig
from cluster_core import event_log, ids
from cluster_core.errors import RachisError, StartError, UnavailableError
from cluster_core.ids import SERVICE_VARIABLE
from cluster_wire.redis_client import connect
from control_plane.intake.tokenization import Tokenizer
from control_plane.pools.controller import Controller
from control_plane.pools.life import Pools
from control_plane.server.composition import RouterPorts, build_router
from control_plane.server.router_server import RouterServer
from control_plane.service import own_places, preflight, reaper
from control_plane.service.embedded_redis import EmbeddedRedis, memory_mib
from control_plane.service.garbage import collect_rarely
from control_plane.service.gateways import GatewayLogs, Gateways
from control_plane.service.lease import ServiceLease
from control_plane.service.state import ServiceState, StateFile
from control_plane.service.workers_end import WorkersEnd
from worker_runtime.node_report import NodeQuestion
from worker_runtime.preloaded_python import JOB_VARIABLE, job_config, preloaded_python

_LOOPBACK = "127.0.0.1"
# A node that has just joined makes a process for the question first.
_NODE_ANSWER_S = 60.0
_REDIS_TIMEOUT_S = 2.0
# Of Ray: `token` where it asks for its token.
_RAY_MODE = "RAY_AUTH_MODE"
_NO_TOKEN = "running, and asks for no token: who reaches its ports may run code here, see docs/access.md"
# What imitated GPUs load; the package lies above this one.
_IMITATION = "imitated_gpu.loaded"

# Pools whose workers prefill prompts for others, or both.
_PREFILL = (wire.POOL_PREFILL, wire.POOL_SHARED)

OnPhase = Callable[[str, str], None]
_Report = TypeVar("_Report")


class Service:
    """A running service: where its router listens, and what serves it."""

    def __init__(
        self, service_id: str, router: RouterServer, pools: Pools, lease: ServiceLease, gateways: Gateways | None
    ) -> None:
        self.service_id = service_id
        # None: none is configured.
        self.gateways = gateways
        # Set once another `rachis serve` has the service's name: this one is to end.
        self.replaced = lease.lost
        self._router = router
        self._pools = pools

    @property
    def address(self) -> str:
        return self._router.address

    @property
    def admin_address(self) -> str:
        """Of administration: that of prompts and sessions, or one of its own."""
        return self._router.admin_address

    @property
    def is_open(self) -> bool:
        """No keys are configured."""
        return self._router.is_open

    @property
    def workers(self) -> list[wire.WorkerRegistration]:
        return [member.registration for member in self._router.membership.members()]

    def missing(self) -> list[admin.PoolWorker]:
        """Workers that are wanted and not ready."""
        workers = [worker for pool in self._pools.status() for worker in pool.workers]
        return [worker for worker in workers if worker.phase != admin.POOL_PHASE_READY]


@asynccontextmanager
async def running_service(loaded: LoadedConfig, state_file: StateFile, on_phase: OnPhase) -> AsyncIterator[Service]:
    """The service of a configuration, up inside the block and gone after it, whatever ends the block.

    `on_phase(part, phase)` hears what each part is doing. Raises StartError, with everything taken down again.
    """
    config = loaded.config
    check_exposure(config)
    service_id = config.service.name or ids.new_service_id()
    mark = ids.new_start_mark(service_id) if config.service.name else service_id
    # Inherited by every process that this one starts.
    os.environ[SERVICE_VARIABLE] = mark
    async with AsyncExitStack() as stack:
        stack.callback(os.environ.pop, SERVICE_VARIABLE, None)
        log_file = state_file.folder / "router-serve.log"
        stack.enter_context(event_log.logged(service_id, "router", config.log_rules, log_file))
        stack.push_async_callback(asyncio.to_thread, reaper.dismiss, reaper.start(mark))
        process = psutil.Process()
        state_file.claim(ServiceState(service_id, "", "", process.pid, process.create_time()))
        stack.callback(state_file.clear, process.pid)
        own_places.check_free(config)
        _fork_imitations(config, stack)
        controller = await _connected_controller(config, service_id, mark, stack, on_phase)
        redis_url = config.redis.url or await _embedded_redis(config, controller, state_file.folder, stack, on_phase)
        lease = await _take_lease(config, redis_url, service_id, stack)
        controller.registry_is_at(redis_url)
        # Where workers are not to outlive this one, others may have outlived the one before.
        running = await controller.running() if config.service.name and config.ray.address is not None else {}
        if not running:
            await _preflight(config, redis_url, controller, on_phase)
        on_phase("router", "starting")
        tokenizer = partial(Tokenizer, beside_models=False)
        ports = RouterPorts(partial(connect, redis_url), actors=controller, tokenizer=tokenizer)
        router = build_router(loaded, service_id, ports)
        pools = router.parts.pools
        assert pools is not None, "the ports have actors"
        await router.start()
        workers_end = WorkersEnd(config, pools, lease, taken_over=bool(running))
        stack.push_async_callback(workers_end.run)
        stack.push_async_callback(router.stop)
        addresses = own_places.reachable(router.address), own_places.reachable(router.admin_address)
        state_file.claim(ServiceState(service_id, *addresses, process.pid, process.create_time()))
        on_phase("router", f"listening on {router.address}")
        await lease.check()
        if running:
            on_phase("workers", f"taking over {len(running)} of a former start")
            await pools.take_over(running)
        else:
            await pools.start(on_phase)
        await _load_adapters(config, router, on_phase)
        following = asyncio.create_task(router.follow_load())
        stack.callback(following.cancel)
        collect_rarely()
        gateways = await _started_gateways(
            config, router.address, redis_url, GatewayLogs(state_file.folder, service_id, config.log_rules), stack
        )
        workers_end.is_up = True
        yield Service(service_id, router, pools, lease, gateways)
        on_phase("service", "stopping")


def _fork_imitations(config: RachisConfig, stack: AsyncExitStack) -> None:
    """Many of them on one machine: vLLM is loaded once, and the local Ray forks each worker from there."""
    if config.engine.device != "imitated" or config.ray.address is not None or JOB_VARIABLE in os.environ:
        return
    os.environ.update(job_config(stack.enter_context(preloaded_python(_IMITATION))))
    stack.callback(os.environ.pop, JOB_VARIABLE, None)


async def _load_adapters(config: RachisConfig, router: RouterServer, on_phase: OnPhase) -> None:
    """Those of the configuration, in place of others under their names. Raises StartError."""
    for name, path in config.lora.folders.items():
        on_phase("adapters", f"loading {name}")
        try:
            await router.parts.adapters.load_instead(name, path)
        except UnavailableError as error:
            if name not in router.parts.adapters.known:
                raise StartError(f"`{name}` is not served: {error}", field="lora.adapters") from None
            on_phase("adapters", f"{name} is served as before: {error}")
        except RachisError as error:
            raise StartError(f"`{name}` is not served: {error}", field="lora.adapters") from None


async def _started_gateways(
    config: RachisConfig, router: str, redis_url: str, logs: GatewayLogs, stack: AsyncExitStack
) -> Gateways | None:
    """Behind the workers: it is no use without them, and has more to load than the router."""
    if config.gateway.port is None:
        return None
    at = own_places.reachable(router)
    gateways = Gateways(config.gateway, at, logs, redis_url=redis_url, security=config.security)
    stack.push_async_callback(gateways.stop)
    gateways.start()
    return gateways


async def _embedded_redis(
    config: RachisConfig, controller: Controller, state_folder: Path, stack: AsyncExitStack, on_phase: OnPhase
) -> str:
    on_phase("redis", "starting")
    if config.service.name:
        folder = state_folder / f"redis-{config.service.name}"
    else:
        folder = Path(tempfile.mkdtemp(prefix="rachis-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    host = config.redis.host or (_LOOPBACK if config.ray.address is None else controller.node_address())
    most_mib = memory_mib(config.gateway.stored_responses)
    server = EmbeddedRedis(folder, host, config.redis.port, is_kept=bool(config.service.name), most_mib=most_mib)
    stack.push_async_callback(server.stop)
    await server.start()
    keeper = asyncio.create_task(server.keep())
    stack.callback(keeper.cancel)
    on_phase("redis", "serving")
    return server.url


async def _take_lease(config: RachisConfig, redis_url: str, service_id: str, stack: AsyncExitStack) -> ServiceLease:
    """One `rachis serve` for each name on a Redis."""
    keeps = ids.registry_digest(redis_url) if config.workers_outlive_serve else ""
    lease = ServiceLease(connect(redis_url, _REDIS_TIMEOUT_S), redis_url, service_id, keeps=keeps)
    stack.push_async_callback(lease.give_back)
    await lease.take()
    keeping = asyncio.create_task(lease.keep())
    stack.callback(keeping.cancel)
    return lease


async def _preflight(config: RachisConfig, redis_url: str, controller: Controller, on_phase: OnPhase) -> None:
    """What would keep workers from starting is said at once, for all nodes together."""

    async def ask_nodes(
        question: Callable[[NodeQuestion], _Report], about: NodeQuestion, *, prefills: bool = False
    ) -> Mapping[str, _Report | str]:
        pools = _PREFILL if prefills else None
        return await controller.ask_nodes(question, about, pools=pools, timeout_s=_NODE_ANSWER_S)

    on_phase("nodes", "asked what they have")
    await preflight.check(config, redis_url, preflight.ask_here if config.ray.address is None else ask_nodes)
    on_phase("nodes", "have what is needed")


async def _connected_controller(
    config: RachisConfig, service_id: str, mark: str, stack: AsyncExitStack, on_phase: OnPhase
) -> Controller:
    on_phase("ray", "starting")
    controller = Controller(config, service_id, mark)
    stack.push_async_callback(controller.close)
    controller.connect()
    # Ray has written there by now what it does.
    asks_for_token = os.environ.get(_RAY_MODE, "").lower() == "token"
    on_phase("ray", "running" if asks_for_token else _NO_TOKEN)
    return controller
