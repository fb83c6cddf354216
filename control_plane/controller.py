"""The pools on Ray: one placement group for each, one actor for each bundle, restarted by Ray when it dies.

Only starting, watching and stopping go through Ray; requests, tokens and KV never do.
"""

import asyncio
import logging
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from rachis.v1 import worker_pb2 as wire
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster_configs.schema import PoolSection, RachisConfig
from cluster_core import ids
from cluster_core.errors import StartError
from control_plane.service_state import SERVICE_VARIABLE
from decode_worker.actor import DecodeWorker
from prefill_worker.actor import PrefillWorker
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.host import WorkerSettings

logger = logging.getLogger(__name__)

_ACTORS: dict[EngineRole, Any] = {EngineRole.PREFILL: PrefillWorker, EngineRole.DECODE: DecodeWorker}


class Controller:
    """The workers of one service. `start`, then `stop`, from one asyncio loop; Ray's calls run on threads."""

    def __init__(self, config: RachisConfig, service_id: str, redis_url: str) -> None:
        self._config = config
        self._service_id = service_id
        self._redis_url = redis_url
        self._groups: list[PlacementGroup] = []
        self._actors: dict[str, Any] = {}
        self._ready: set[str] = set()

    def connect(self) -> None:
        """Starts or joins Ray. Raises StartError. To be called on the main thread and before any gRPC server starts:
        Ray forks its own servers, and the kernel ends them when the thread that forked them ends."""
        # Ray reads these when it starts: no phoning home, no killing of workers by a guess about memory.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        try:
            with _own_signal_handlers():
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **self._cluster())
        except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise StartError(f"Ray did not start: {error}", field="ray.address") from None

    def _cluster(self) -> dict[str, Any]:
        """The cluster to join, or what a local one is started with."""
        settings = self._config.ray
        if settings.address is not None:
            return {"address": settings.address}
        cpus = sum(pool.cpus_per_worker * pool.workers for _, pool in self._pools())
        return {
            "num_cpus": max(1, math.ceil(cpus)),
            "include_dashboard": False,
            "object_store_memory": settings.object_store_mib << 20,
            "_node_ip_address": "127.0.0.1",
        }

    async def start_workers(self) -> None:
        """Raises StartError saying which pool finds no room in the Ray cluster."""
        for role, pool in self._pools():
            await asyncio.to_thread(self._start_pool, role, pool)

    async def wait_ready(self) -> list[wire.WorkerRegistration]:
        """All workers serving."""
        return await asyncio.gather(*(asyncio.to_thread(self._wait, name) for name in self._actors))

    async def stop(self) -> None:
        """Engines first, then actors, placement groups and, where this service started it, Ray."""
        await asyncio.gather(*(asyncio.to_thread(self._stop_worker, name) for name in list(self._actors)))
        try:
            for group in self._groups:
                remove_placement_group(group)
        except RayError as error:
            logger.warning("a placement group stays behind: %s", error)
        finally:
            await asyncio.to_thread(ray.shutdown)

    def _pools(self) -> list[tuple[EngineRole, PoolSection]]:
        return [(EngineRole.PREFILL, self._config.pools.prefill), (EngineRole.DECODE, self._config.pools.decode)]

    def _start_pool(self, role: EngineRole, pool: PoolSection) -> None:
        bundle = {"CPU": pool.cpus_per_worker, "GPU": pool.gpus_per_worker}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group = placement_group(
            [bundle] * pool.workers, pool.placement_strategy, name=f"{self._service_id}-{role.value}"
        )
        self._groups.append(group)
        try:
            ray.get(group.ready(), timeout=self._config.limits.start_timeout_s)
        except GetTimeoutError:
            raise StartError(
                f"Ray has no room for {pool.workers} {role.value} workers of {bundle}; "
                f"it has {ray.cluster_resources()}",
                field=f"pools.{role.value}",
            ) from None
        for index in range(pool.workers):
            self._start_worker(role, pool, group, index)

    def _start_worker(self, role: EngineRole, pool: PoolSection, group: PlacementGroup, index: int) -> None:
        name = ids.worker_id(role.value, index)
        options = {
            "name": f"{self._service_id}-{name}",
            "num_cpus": pool.cpus_per_worker,
            "num_gpus": pool.gpus_per_worker,
            "max_restarts": pool.max_restarts,
            "max_concurrency": 4,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "runtime_env": {"env_vars": {SERVICE_VARIABLE: self._service_id}},
        }
        settings = WorkerSettings(
            worker_id=name,
            service_id=self._service_id,
            engine=EngineSettings(
                self._config.model,
                self._config.engine,
                self._config.handoff,
                role,
                self._config.streaming,
                self._config.pools.host or self._host(),
                self._config.tiers,
                self._config.decode,
                self._config.index,
            ),
            redis_url=self._redis_url,
            redis_lease_s=self._config.redis.worker_lease_s,
            max_message_bytes=self._config.router.max_message_mib << 22,
            start_timeout_s=self._config.limits.start_timeout_s,
        )
        self._actors[name] = _ACTORS[role].options(**options).remote(settings, self._config.log_level)

    def _host(self) -> str:
        """Empty lets each worker take its own node's address."""
        return "127.0.0.1" if self._config.ray.address is None else ""

    def _wait(self, name: str) -> wire.WorkerRegistration:
        timeout_s = self._config.limits.start_timeout_s
        try:
            record = ray.get(self._actors[name].wait_ready.remote(timeout_s), timeout=timeout_s + 10)
        except GetTimeoutError:
            raise StartError(f"worker {name} did not come up in {timeout_s:g} s") from None
        except RayActorError as error:
            raise StartError(f"worker {name} died while starting: {error}") from None
        except RayError as error:
            raise StartError(str(getattr(error, "cause", None) or error)) from None
        self._ready.add(name)
        return wire.WorkerRegistration.FromString(record)

    def _stop_worker(self, name: str) -> None:
        timeout_s = self._config.limits.stop_timeout_s
        actor = self._actors[name]
        try:
            if name in self._ready:
                # One that is still starting holds nothing that has to be put in order.
                ray.get(actor.stop.remote(timeout_s), timeout=timeout_s)
        except RayError as error:
            logger.warning("worker %s did not stop cleanly and is ended: %s", name, error)
        try:
            ray.kill(actor, no_restart=True)
        except RayError as error:
            logger.warning("worker %s could not be ended: %s", name, error)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keeps the handlers of this process: Ray replaces them with some that abort it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
