"""One router process's gRPC server: our services, standard health checking and reflection, in one order of stopping."""

import asyncio
import random

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rachis import wire as conventions
from rachis.v1 import admin_pb2, admin_pb2_grpc, router_pb2, router_pb2_grpc
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig
from cluster_core import versions
from cluster_core.errors import StartError
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.journey import JourneyLimits
from control_plane.fleet.fencing import Fence
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.fleet.worker_client import WorkerClient
from control_plane.fleet.worker_views import WorkerViews
from control_plane.intake.admission import Admission
from control_plane.intake.malformed_input import MalformedInputInterceptor
from control_plane.intake.tokenization import Tokenizer
from control_plane.metrics.placement_metrics import PlacementCollector
from control_plane.metrics.probe_server import Probes
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.metrics.service_metrics import ServiceCollector
from control_plane.metrics.worker_metrics import WorkerCollector
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.index_queries import IndexQueries
from control_plane.placement.placer import Placer
from control_plane.placement.replication import Replication
from control_plane.placement.replicator import Replicator
from control_plane.pools.life import Actors, Pools
from control_plane.pools.load_following import PoolFollowing
from control_plane.prefix_index.followed_index import FollowedIndex
from control_plane.prefix_index.index_check import IndexCheck
from control_plane.server.admin_service import AdminService
from control_plane.server.router_service import RouterService
from control_plane.sessions.serving import StreamingSessions

ROUTER_SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
# Whether the process is alive, whatever it can serve; the other names say whether it is ready for requests.
LIVENESS = "liveness"
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
# gRPC itself cuts messages off at this multiple of our limit; below it we answer with a sentence.
_HARD_LIMIT_FACTOR = 4
# What a client may have on its way to a session that is not read. gRPC would widen it by measurement, to megabytes.
_STREAM_WINDOW_BYTES = 256 << 10
_FIXED_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", _STREAM_WINDOW_BYTES)]


class RouterServer:
    """Everything of one router. `start`, then `stop`; `address` is set in between."""

    def __init__(self, loaded: LoadedConfig, service_id: str, redis_url: str) -> None:
        config = loaded.config
        self._loaded = loaded
        self._service_id = service_id
        self._redis_url = redis_url
        self._config = config.router
        max_message_bytes = config.router.max_message_mib << 20
        self.membership = Membership(trust_after_s=config.redis.worker_lease_s, versions=versions.installed())
        self._follower = RegistryFollower(
            redis_url,
            service_id,
            self.membership,
            refresh_s=config.redis.refresh_s,
            worker_lease_s=config.redis.worker_lease_s,
            on_read=self._workers_read,
        )
        self._client = WorkerClient(max_message_bytes * _HARD_LIMIT_FACTOR)
        self._views = WorkerViews(self.membership, self._client)
        self._prefixes = FollowedIndex(config, redis_url, service_id, self.membership)
        index = IndexPorts(
            self._prefixes.index,
            is_stale=self._prefixes.claims.is_stale,
            now_s=self._prefixes.accesses.now_s,
            record_access=self._prefixes.accesses.record,
        )
        self._placer = Placer(
            self.membership,
            index,
            config.placement,
            service_id=service_id,
            chunk_tokens=config.chunk_blocks * config.engine.block_size_tokens,
            rng=random.Random(config.placement.seed),
        )
        self._replicator = Replicator(
            redis_url,
            service_id,
            self._prefixes.router_id,
            self._placer,
            self._client,
            Replication(config.placement.replication_load, config.placement.replicas),
        )
        self._replicates = config.placement.replication and config.placement.policy == "hotness"
        self._dispatcher = Dispatcher(
            self.membership,
            self._follower.changed,
            self._client,
            self._placer,
            JourneyLimits(
                prefill_attempts=config.router.prefill_attempts,
                worker_wait_s=config.router.queue_timeout_s,
                handoff_deadline_s=config.handoff.deadline_s,
            ),
        )
        admission = self._admission = Admission(
            config.router.max_in_flight_requests, config.router.max_queued_requests, config.router.queue_timeout_s
        )
        self._tokenizer = Tokenizer(config.model.resolved_path)
        self.metrics = RouterMetrics(config.objectives.ttft_s)
        sessions = StreamingSessions(
            self.membership,
            self._dispatcher,
            self._client,
            admission,
            self._tokenizer,
            config.streaming,
            self.metrics,
            request_timeout_s=config.router.request_timeout_s,
        )
        self._router = RouterService(
            self.membership,
            self._dispatcher,
            admission,
            self._tokenizer,
            sessions,
            self.metrics,
            request_timeout_s=config.router.request_timeout_s,
        )
        self._check = IndexCheck(self.membership, self._prefixes.index, self._client.prefix_claims)
        self._queries = IndexQueries(
            self.membership,
            index,
            self._placer,
            self._tokenizer,
            self._check,
            health=self._prefixes.claims.health,
            policy=config.placement.policy,
        )
        self._admin = AdminService(
            loaded,
            service_id,
            self.membership,
            self._follower,
            self._client,
            self._views,
            self._router,
            self._dispatcher,
            admission,
            self.metrics,
            self._queries,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            interceptors=[MalformedInputInterceptor(max_message_bytes)],
            options=[*conventions.channel_options(max_message_bytes * _HARD_LIMIT_FACTOR), *_FIXED_WINDOW],
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.address = ""

    @property
    def workers_changed(self) -> asyncio.Condition:
        """Notified whenever placement sees other workers than before."""
        return self._follower.changed

    def pools(self, actors: Actors) -> Pools:
        """The pools of the service whose controller runs beside this router; to be asked for before `start`."""
        fence = Fence(self._redis_url, self._service_id)
        pools = self._admin.pools = Pools(self._loaded.config, actors, self.membership, self._client, fence)
        self._following = PoolFollowing(
            self._loaded.config, pools, self.membership, self.metrics.recent_ttft, lambda: self._admission.queued
        )
        return pools

    async def follow_load(self) -> None:
        """Lets the pools follow it where they are configured to, until cancelled."""
        await self._following.run()

    async def start(self) -> None:
        """Listens. Health says SERVING once a decode worker is ready. Raises StartError when the port is taken."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._router, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (ROUTER_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        wanted = f"{self._config.host}:{self._config.port}"
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError:
            raise StartError(
                f"cannot listen on {wanted}; is another service running there?", field="router.port"
            ) from None
        self.address = f"{self._config.host}:{port}"
        loop = asyncio.get_running_loop()
        self.metrics.registry.register(WorkerCollector(self._views, loop))
        self.metrics.registry.register(
            ServiceCollector(self._loaded.config, self._admission, self._follower, self._admin.pool_status, loop)
        )
        untrue = lambda: self._check.untrue  # noqa: E731
        self.metrics.registry.register(
            PlacementCollector(self._queries.status, self._placer.counts, self._replicator, untrue, loop)
        )
        try:
            self.metrics.serve(self._config.host, self._config.metrics_port, Probes(loop, self._not_ready))
        except OSError as error:
            place = f"{self._config.host}:{self._config.metrics_port}"
            raise StartError(
                f"cannot serve metrics on {place}: {error.strerror}", field="router.metrics_port"
            ) from None
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._tokenizer.load()
        await self._server.start()
        self._tasks = [
            asyncio.create_task(self._follower.follow()),
            asyncio.create_task(self._watch_health()),
            *self._prefixes.start(),
        ]
        if self._replicates:
            self._tasks.append(asyncio.create_task(self._replicator.run()))

    async def stop(self) -> None:
        """NOT_SERVING first, then no new requests, then those that run finish or are cut off."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=self._config.drain_timeout_s)
        # Whoever reads them has the workers asked.
        await asyncio.to_thread(self.metrics.close)
        await self._dispatcher.close()
        await self._client.close()
        await self._follower.close()
        await self._prefixes.close()
        await self._replicator.close()

    def _not_ready(self) -> str:
        """Why no request is served, in a sentence; empty where they are."""
        if self._stopping:
            return "the service is stopping"
        return "" if self.membership.usable(wire.POOL_DECODE) else "no decode worker is usable: see `rachis status`"

    def _workers_read(self) -> None:
        """Whose lease has ended holds nothing from now on."""
        self._prefixes.claims.membership_changed()

    async def _watch_health(self) -> None:
        async with self._follower.changed:
            while True:
                serving = bool(self.membership.usable(wire.POOL_DECODE))
                status = health_pb2.HealthCheckResponse
                await self._set_health(status.SERVING if serving else status.NOT_SERVING)
                addresses = {member.registration.address for member in self.membership.members()}
                self._client.keep_only(addresses)
                await self._follower.changed.wait()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", ROUTER_SERVICE, ADMIN_SERVICE):
            await self._health.set(service, status)
