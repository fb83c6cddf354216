"""The processes of workers on Ray: one actor for each, restarted by Ray, elsewhere if need be, when it dies.

Only starting, watching and stopping go through Ray; requests, tokens and KV never do.

Actors of a named service on a Ray that it joins are detached: they outlive this process, and the next controller of
that service takes them over.
"""

import asyncio
import logging
import math
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray
from ray._private import state as ray_state
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster_configs.schema import PoolSection, RachisConfig
from cluster_core import versions
from cluster_core.errors import StartError
from cluster_core.ids import SERVICE_VARIABLE
from cluster_core.ports import PortRange
from cluster_wire.secret import fingerprint_of
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.actor_names import ActorName, fitting, is_namesake, namespace, settings_digest
from control_plane.pools.pool_sections import sections
from control_plane.pools.ray_start import start_ray
from control_plane.pools.worker_kinds import ACTORS, ROLES
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.host import WorkerSettings

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Calls of Ray at once: a worker that stops takes one for as long as it may take.
_MOST_CALLS = 64
# Those that wait for it to be ready may be of several controllers, one after the other.
_CALLS_OF_AN_ACTOR = 32
# What Ray calls an actor that has no process: it waits for room, or for its node's successor.
_WITHOUT_PROCESS = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})
_ENDED = (
    "its process has ended as often as max_restarts allows; `rachis restart --rolling` with its name starts it anew"
)
# A Ray that this service starts has room for twice its workers: to scale, and to restart one by one.
_LOCAL_ROOM = 2


@dataclass(slots=True)
class _Started:
    """One actor. came_up: its answer to `wait_ready`."""

    pool: Pool
    actor: Any
    came_up: "asyncio.Future[bytes]"

    @property
    def actor_id(self) -> str:
        return _id_of(self.actor)

    @classmethod
    def of(cls, pool: Pool, actor: Any, timeout_s: float, loop: asyncio.AbstractEventLoop) -> "_Started":
        """An actor that Ray has been asked for; it is waited for so long."""
        came_up = actor.wait_ready.remote(timeout_s).future()
        return cls(pool, actor, asyncio.wrap_future(came_up, loop=loop))


class Controller:
    """The actors of one service; see `control_plane.pools.actors.Actors`. Ray's calls that block run on threads.

    mark: what every process of this start carries in its environment, but for those that outlive it: they carry the
    service's id.
    """

    def __init__(self, config: RachisConfig, service_id: str, mark: str) -> None:
        self._config = config
        self._sections = sections(config.pools)
        self._service_id = service_id
        self._outlives = config.workers_outlive_serve
        self._mark = service_id if self._outlives else mark
        self._redis_url = ""
        self._started: dict[str, _Started] = {}
        # Ray's calls block, some for long: not on the threads that tokenize prompts.
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="ray")

    def connect(self) -> None:
        """Starts or joins Ray. Raises StartError. To be called on the main thread and before any gRPC server starts:
        Ray forks its own servers, and the kernel ends them when the thread that forked them ends."""
        # Ray reads these when it starts: no phoning home, no killing of workers by a guess about memory.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        # Engines would otherwise run at nice 15, behind everything else on the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        if self._config.ray.address is not None:
            # `ray start` asks for the token of a user who has one; a driver that joins has it only when told to.
            logging.getLogger("ray").setLevel(logging.ERROR)
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            with _own_signal_handlers():
                init = partial(ray.init, log_to_driver=False, logging_level=logging.ERROR, **self._cluster())
                # A Ray that is joined runs already.
                start_ray(init) if self._config.ray.address is None else init()
        except Exception as error:  # noqa: BLE001 - Ray raises a bare one where its own node is not up within 30 s
            raise StartError(f"Ray did not start: {error}", field="ray.address") from None

    def registry_is_at(self, redis_url: str) -> None:
        """Where workers register; to be told before the first is started."""
        self._redis_url = redis_url

    def node_address(self) -> str:
        """Under which other nodes of the Ray cluster reach this one."""
        address: str = ray.util.get_node_ip_address()
        return address

    async def ask_nodes(
        self, question: Callable[..., _Answer], *args: Any, pools: Collection[Pool] | None = None, timeout_s: float
    ) -> dict[str, _Answer | str]:
        """What each living node that may run a worker (of `pools`) answers, by its name; of one that is late, why."""
        return await self._on_thread(self._ask_nodes, question, args, pools or self._sections, timeout_s)

    async def running(self) -> Mapping[str, Pool]:
        """Those that a former controller of the service has started, by worker id; from now on they are this one's.

        Those that were started with other settings are ended: they do not fit those to come. Raises StartError.
        """
        try:
            handles = await self._on_thread(self._left_running)
        except RayError as error:
            raise StartError(f"Ray does not say what runs: {error}", field="ray.address") from None
        own = self._sections.items()
        digests = {pool: settings_digest(self._settings(pool, ""), _demand(section)) for pool, section in own}
        kept = fitting(handles, digests) if self._outlives else set()
        others = handles.keys() - kept
        for name in others:
            logger.warning("%s runs with other settings and is ended", name.worker_id)
        await asyncio.gather(*(self._on_thread(self._stop, name.worker_id, handles[name]) for name in others))
        loop, timeout_s = asyncio.get_running_loop(), self._config.limits.start_timeout_s
        for name in kept:
            self._started[name.worker_id] = _Started.of(name.pool, handles[name], timeout_s, loop)
        return {name.worker_id: name.pool for name in kept}

    async def start(self, pool: Pool, worker_id: str) -> None:
        try:
            await self._on_thread(self._start, pool, worker_id, asyncio.get_running_loop())
        except RayError as error:
            raise StartError(f"Ray does not take {worker_id}: {error}") from None

    async def failure(self, worker_id: str) -> str:
        started = self._started.get(worker_id)
        if started is not None:
            await asyncio.wait({started.came_up})
            # Who was stopped meanwhile has not failed.
            error = None if started.came_up.cancelled() else started.came_up.exception()
            if isinstance(error, RayActorError) and started.actor_id not in await self._on_thread(self._ended):
                # Ray starts it again; whether that comes up is told by the registry.
                logger.warning("%s died while it started: %s", worker_id, error)
            elif error is not None:
                return str(getattr(error, "cause", None) or error)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, worker_id: str) -> None:
        started = self._started.pop(worker_id, None)
        if started is not None:
            started.came_up.cancel()
            await self._on_thread(self._stop, worker_id, started.actor)

    async def without_node(self) -> Mapping[str, str]:
        return await self._on_thread(self._without_node)

    async def close(self) -> None:
        """Leaves Ray, and ends it where this service started it."""
        await self._on_thread(ray.shutdown)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _cluster(self) -> dict[str, Any]:
        """The cluster to join, or what a local one is started with."""
        settings = self._config.ray
        if settings.address is not None:
            return {"address": settings.address}
        pools = self._sections.values()
        cpus = sum(pool.cpus_per_worker * max(pool.workers, 1) for pool in pools)
        named = {pool.node_resource: 1024 for pool in pools if pool.node_resource is not None}
        return {
            # Another one that runs on this host, or whose address file is left, is none of ours.
            "address": "local",
            "num_cpus": max(1, math.ceil(_LOCAL_ROOM * cpus)),
            "resources": named,
            "include_dashboard": False,
            "object_store_memory": settings.object_store_mib << 20,
            "_node_ip_address": "127.0.0.1",
        }

    def _ask_nodes(
        self, question: Callable[..., _Answer], args: tuple[Any, ...], pools: Collection[Pool], timeout_s: float
    ) -> dict[str, _Answer | str]:
        task = ray.remote(num_cpus=0, max_retries=0)(question)
        demands = [_resources(section) for pool, section in self._sections.items() if pool in pools]
        asked = {}
        for node in ray.nodes():
            if node["Alive"] and any(_fits(demand, node["Resources"]) for demand in demands):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                asked[_name(node)] = task.options(scheduling_strategy=there).remote(*args)
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        return {name: self._answer(reference) for name, reference in asked.items()}

    def _answer(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=0)
        except GetTimeoutError:
            return "it did not answer in time"
        except RayError as error:
            words = str(getattr(error, "cause", None) or error).strip() or type(error).__name__
            return words.splitlines()[-1]

    def _left_running(self) -> dict[ActorName, Any]:
        """The actors of this service that Ray has, each with its handle."""
        here, found = self._namespace, {}
        everywhere = ray.util.list_named_actors(all_namespaces=True)
        if any(is_namesake(named["namespace"], self._service_id, self._redis_url) for named in everywhere):
            logger.warning(
                "workers of a service %s on another Redis run on this Ray: they are left alone, and end by themselves "
                "once nobody keeps them (service.orphan_s)",
                self._service_id,
            )
        for named in everywhere:
            name = ActorName.parse(named["name"]) if named["namespace"] == here else None
            if name is not None:
                # It may just have ended.
                with suppress(ValueError):
                    found[name] = ray.get_actor(named["name"], here)
        return found

    def _start(self, pool: Pool, worker_id: str, loop: asyncio.AbstractEventLoop) -> None:
        section, settings = self._sections[pool], self._settings(pool, worker_id)
        options = {
            # A name of its own for each start: Ray frees a name some time after its actor has ended.
            "name": str(ActorName.of(settings, _demand(section))),
            "namespace": self._namespace,
            "lifetime": "detached" if self._outlives else None,
            **_demand(section),
            "max_concurrency": _CALLS_OF_AN_ACTOR,
            "runtime_env": {"env_vars": {SERVICE_VARIABLE: self._mark}},
        }
        actor = ACTORS[pool].options(**options).remote(settings, self._config.log_rules)
        self._started[worker_id] = _Started.of(pool, actor, settings.start_timeout_s, loop)

    @property
    def _namespace(self) -> str:
        return namespace(self._service_id, self._redis_url)

    def _settings(self, pool: Pool, worker_id: str) -> WorkerSettings:
        limits = self._config.limits
        return WorkerSettings(
            worker_id=worker_id,
            service_id=self._service_id,
            engine=self._engine_settings(ROLES[pool]),
            redis_url=self._redis_url,
            redis_lease_s=self._config.redis.worker_lease_s,
            max_message_bytes=self._config.router.max_message_mib << 22,
            start_timeout_s=limits.start_timeout_s,
            versions=versions.installed(),
            drain_timeout_s=limits.drain_timeout_s,
            session_grace_s=limits.session_grace_s,
            stall_timeout_s=limits.stall_timeout_s,
            secret_fingerprint=fingerprint_of(self._config.security.secret_path),
            orphan_s=self._config.service.orphan_s if self._outlives else 0.0,
        )

    def _engine_settings(self, role: EngineRole) -> EngineSettings:
        config = self._config
        return EngineSettings(
            *(config.model, config.engine, config.handoff, role),
            config.streaming,
            self._host(),
            *(config.tiers, config.decode, config.index),
            # Which adapters there are is the service's own, and no reason to end an engine.
            config.lora.model_copy(update={"adapters": ()}),
            network=config.pools.network,
            ports=PortRange.parse(config.pools.ports) if config.pools.ports is not None else None,
            secret_file=config.security.secret_path,
            objectives=config.objectives.for_engines,
            tracing=config.tracing.for_engines,
        )

    def _host(self) -> str:
        """Empty lets each worker find its own node's address."""
        is_local = self._config.ray.address is None and self._config.pools.network is None
        return "127.0.0.1" if is_local else ""

    def _stop(self, worker_id: str, actor: Any) -> None:
        timeout_s = self._config.limits.stop_timeout_s
        try:
            if _id_of(actor) not in self._without_process():
                ray.get(actor.stop.remote(timeout_s), timeout=timeout_s)
        except (RayError, RuntimeError, OSError) as error:
            logger.warning("worker %s did not stop cleanly and is ended: %s", worker_id, error)
        try:
            ray.kill(actor, no_restart=True)
        except (RayError, RuntimeError, OSError) as error:
            logger.warning("worker %s could not be ended: %s", worker_id, error)

    async def _on_thread(self, call: Callable[..., _Answer], *args: Any) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def _ended(self) -> set[str]:
        """Actors that Ray does not start again."""
        return {actor_id for actor_id, actor in ray_state.actors().items() if actor["State"] == "DEAD"}

    def _without_process(self) -> set[str]:
        return {
            actor_id
            for actor_id, actor in ray_state.actors().items()
            if actor["State"] in _WITHOUT_PROCESS and not actor["Address"]["Port"]
        }

    def _without_node(self) -> Mapping[str, str]:
        started, ended, waiting = dict(self._started), self._ended(), self._without_process()
        rooms = {
            pool: self._room(pool) for pool in {each.pool for each in started.values() if each.actor_id in waiting}
        }
        found = {name: rooms[each.pool] for name, each in started.items() if each.actor_id in waiting}
        return found | {name: _ENDED for name, each in started.items() if each.actor_id in ended}

    def _room(self, pool: Pool) -> str:
        """Why no node takes a worker of this pool; empty where one does."""
        demand = _resources(self._sections[pool])
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        free = ray_state.available_resources_per_node()
        if any(_fits(demand, free.get(node_id, {})) for node_id in nodes):
            return ""
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in demand.items())
        there = "; ".join(
            f"{_name(node)} has "
            + ", ".join(
                f"{free.get(node_id, {}).get(name, 0):g} of {node['Resources'].get(name, 0):g} {name}"
                for name in demand
            )
            for node_id, node in sorted(nodes.items(), key=lambda item: _name(item[1]))
        )
        return f"no node has {wanted} free: {there}"


def _id_of(actor: Any) -> str:
    """As Ray tells an actor's state by."""
    name: str = actor._actor_id.hex()
    return name


def _resources(section: PoolSection) -> dict[str, float]:
    """What a worker of the pool takes of its node, by Ray's names."""
    wanted = {"CPU": section.cpus_per_worker, "GPU": section.gpus_per_worker}
    if section.node_resource is not None:
        wanted[section.node_resource] = 1.0
    return {name: amount for name, amount in wanted.items() if amount}


def _demand(section: PoolSection) -> dict[str, Any]:
    """The same as options of an actor, with all that Ray is told of it."""
    named = {section.node_resource: 1.0} if section.node_resource is not None else {}
    return {
        "num_cpus": section.cpus_per_worker,
        "num_gpus": section.gpus_per_worker,
        "resources": named,
        "max_restarts": section.max_restarts,
        "scheduling_strategy": "SPREAD" if section.placement_strategy == "SPREAD" else "DEFAULT",
    }


def _fits(demand: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in demand.items())


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


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
