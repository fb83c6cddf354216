"""The cluster of one run: the real router and the real workers' services, on local transport, Redis, time and engines.

What is replaced of the production code are the router's ports, the workers' Redis and servers, and nothing else.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest import mock

from rachis.v1 import router_pb2_grpc
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig, load
from cluster_core.background import BackgroundTasks
from cluster_core.clock import ClusterClock, UnixMs, unix_ms
from cluster_core.engine_jobs import EngineJob
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.server.router_server import RouterServer
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.local_grpc.transport import LocalTransport
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.local_router import CLIENT, LocalRouter
from fault_sim.local_worker import LocalWorker
from fault_sim.network import Network
from fault_sim.plan import MODEL_TOKENS, Plan
from fault_sim.tries import Tries, nonce_of

SERVICE = "svc-simulated"
LEASE_S = 6
REQUEST_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 3.0
_MOST_SKEW_MS = 600_000
# A job whose request has ended is aborted by then.
_HEEDED_S = 0.05
# Until a process that has died is started again.
_RESTART_S = 1.0
# Of a client's calls where some clients are slow: a few messages.
_NARROW_BYTES = 256
_SETTINGS: dict[str, Any] = {
    "router.port": 0,
    "router.request_timeout_s": REQUEST_TIMEOUT_S,
    "router.send_timeout_s": SEND_TIMEOUT_S,
    "router.queue_timeout_s": 5,
    "router.drain_timeout_s": 2,
    "handoff.lease_s": LEASE_S,
    "handoff.deadline_s": LEASE_S / 2,
    "redis.worker_lease_s": 2,
    "redis.refresh_s": 0.5,
    "index.chunk_tokens": 32,
    "index.max_entries": 1024,
    "index.refresh_s": 0.5,
    "index.write_interval_s": 0.25,
}


@dataclass(frozen=True, slots=True)
class Death:
    """Of an engine, by what it computed. nonce: of the request, which came at `asked_s`. wish: what it asked for."""

    at_s: float
    nonce: str
    asked_s: float
    wish: str


class World:
    """`start`, then `stop`. trace: one line for each thing that happened, with its time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.trace: list[str] = []
        self.defects: list[str] = []
        # Names of jobs that ran on long after their requests had ended.
        self.unheeded: list[str] = []
        self.deaths: list[Death] = []
        self._tries = Tries()
        self._nonces: dict[int, str] = {}
        # By nonce, with when they came.
        self._jobs: dict[str, tuple[float, Job]] = {}
        self._restarts = BackgroundTasks()
        self._starting = asyncio.Lock()
        self.network = Network(Random(f"network {plan.seed}"))
        self.transport = LocalTransport(self.network, self.note)
        if plan.has_slow_readers:
            for name in plan.routers:
                self.network.link(CLIENT, name).window_bytes = _NARROW_BYTES
        self.fabric = Fabric(self.network)
        self.fabric.on_poisoned = self._poisoned
        self.fabric.on_asked = self._asked
        self.store = Store()
        self.routers: dict[str, LocalRouter] = {}
        self.lost_routers: list[LocalRouter] = []
        self.workers: dict[str, LocalWorker] = {}
        self.started: list[LocalWorker] = []
        self.config = _loaded(plan)

    def note(self, line: str) -> None:
        self.trace.append(f"{self._now_s():.6f} {line}")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def start(self) -> None:
        """Returns once every worker may get requests of every router."""
        for name in self.plan.routers:
            await self.start_router(name)
        for name in self.plan.workers:
            self.start_worker(name)
        for router in self.routers.values():
            async with asyncio.timeout(60), router.server.workers_changed:
                while not all(_is_usable(router.server, name) for name in self.workers):
                    await router.server.workers_changed.wait()

    async def start_router(self, name: str) -> None:
        """Where it does not run."""
        async with self._starting:
            if name not in self.living:
                await self._start_router(name)

    async def _start_router(self, name: str) -> None:
        redis = partial(self._redis, name)
        router = LocalRouter(name, self.config, SERVICE, self.transport, redis, self.job, self.ended)
        await router.start()
        self.routers[name] = router

    def api(self, number: int) -> "router_pb2_grpc.RouterServiceAsyncStub":
        """Of all routers in turn, those included that are away."""
        routers = list(self.routers.values())
        return routers[number % len(routers)].api

    def kill_router(self, name: str) -> None:
        self.lost_routers.append(self.routers[name])
        self.routers[name].kill()

    @property
    def lifecycles(self) -> list[RequestLifecycle]:
        """Of requests at routers that live; what a router that was killed knew is lost."""
        return [each for router in self.living_routers for each in router.lifecycles]

    @property
    def living(self) -> set[str]:
        """Names of the routers that do."""
        return {router.host for router in self.living_routers}

    @property
    def living_routers(self) -> list[LocalRouter]:
        return [router for router in self.routers.values() if router not in self.lost_routers]

    async def stop(self) -> None:
        for router in self.living_routers:
            await router.stop()
        for router in self.lost_routers:
            await router.ended()
        for worker in self.workers.values():
            await worker.stop()

    def job(self, **values: Any) -> Job:
        """In place of `Job`: its name in the engines is remembered."""
        made = Job(**values)
        self._nonces[id(made.lifecycle)] = made.nonce
        self._jobs[made.nonce] = (self._now_s(), made)
        return made

    @property
    def longest_wait_s(self) -> float:
        """Of a router, for a client to read."""
        return max(router.longest_wait_s for router in (*self.routers.values(), *self.lost_routers))

    def ended(self, lifecycle: RequestLifecycle) -> None:
        asyncio.get_running_loop().call_later(_HEEDED_S, self._look_for_jobs, lifecycle)

    def _look_for_jobs(self, lifecycle: RequestLifecycle) -> None:
        nonce = self._nonces.get(id(lifecycle))
        for name, worker in self.workers.items():
            jobs = worker.engine.live_jobs() if worker.engine is not None and nonce else ()
            self.unheeded += [f"{lifecycle.request_id} at {name}" for job in jobs if job.startswith(f"r{nonce}.")]

    def _redis(self, host: str, timeout_s: float) -> Any:
        return LocalRedis(self.store, self.network, host, timeout_s)

    def start_worker(self, name: str) -> None:
        plan = self.plan
        settings = BlockEngineSettings(
            blocks=plan.prefill_blocks if name.startswith("prefill") else plan.decode_blocks,
            max_model_len=MODEL_TOKENS,
            deadline_s=LEASE_S / 2,
            lease_s=LEASE_S,
            pull_token_s=plan.pull_token_s,
            chunk_tokens=self.config.config.index.chunk_tokens,
            service_id=SERVICE,
        )
        config = self.config.config
        redis = partial(self._redis, name)
        worker = LocalWorker(name, config, SERVICE, self.transport, redis, self.fabric, settings, self._clock(name))
        self.workers[name] = worker
        self.started.append(worker)

    async def restart_worker(self, name: str) -> None:
        """One start after the other."""
        async with self._starting:
            await self.workers[name].kill()
            self.start_worker(name)

    def _clock(self, host: str) -> ClusterClock:
        """Every worker's host has a clock of its own, and no two of them agree."""
        ahead_ms = Random(f"clock {self.plan.seed} {host}").randint(-_MOST_SKEW_MS, _MOST_SKEW_MS)
        return ClusterClock(lambda: UnixMs(unix_ms() + ahead_ms))

    def _poisoned(self, host: str, engine_job: EngineJob) -> None:
        """The engine's process ends with it, and is started again."""
        nonce = nonce_of(engine_job.request_id)
        asked_s, job = self._jobs[nonce]
        wish = f"{job.scope.cache_salt} {job.sampling.SerializeToString(deterministic=True)!r} {job.token_ids}"
        self.note(f"{host} dies of {job.request_id}")
        if not job.prompt_changes:
            self.deaths.append(Death(self._now_s(), nonce, asked_s, wish))
        self._restarts.start(self._restart(self.workers[host]))

    def _asked(self, host: str, job: EngineJob) -> None:
        engine = self.workers[host].engine
        self._tries.asked(host, job.request_id, engine.live_jobs() if engine else (), self._now_s())

    def stall_begins(self, name: str) -> None:
        self._tries.stall_begins(name, self._now_s())

    def stall_ends(self, name: str) -> None:
        """Whichever start of the worker it is by now."""
        self._tries.stall_ends(name, self._now_s())

    def had_no_chance(self, lifecycle: RequestLifecycle) -> bool:
        """Two tries of the request were at workers that died under it, or hung without that anybody could know it."""
        nonce = self._nonces.get(id(lifecycle), "")
        deaths = self._jobs[nonce][1].deaths if nonce else 0
        return self._tries.unknown_hangs(nonce) + deaths > 1

    async def _restart(self, worker: LocalWorker) -> None:
        await worker.kill()
        await asyncio.sleep(_RESTART_S)
        if self.workers[worker.name] is worker:
            self.start_worker(worker.name)


@contextmanager
def noting_defects(world: World) -> Iterator[None]:
    """What production code logs goes nowhere but into the world's defects."""
    with mock.patch.object(logging.root, "handlers", [_Defects(world.defects)]):
        yield


class _Defects(logging.Handler):
    """What the production code logs with a traceback is something that it did not expect."""

    def __init__(self, defects: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._defects = defects

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._defects.append(f"{record.getMessage()}: {logging.Formatter().formatException(record.exc_info)}")


def _is_usable(server: RouterServer, name: str) -> bool:
    member = server.membership.get(name)
    return member is not None and member.registration.state == wire.WORKER_STATE_READY


def _loaded(plan: Plan) -> LoadedConfig:
    return load(flags={**_SETTINGS, **dict(plan.settings)})
