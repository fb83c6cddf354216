"""One router process's gRPC server: our services, standard health checking and reflection, in one order of stopping."""

import asyncio
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rachis.v1 import admin_pb2, admin_pb2_grpc, router_pb2, router_pb2_grpc
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import RachisConfig
from cluster_core.background import BackgroundTasks
from cluster_core.errors import StartError
from control_plane.access.certificates import Certificates
from control_plane.access.door import Door
from control_plane.console.admin_calls import AdminCalls
from control_plane.console.pages import ConsolePages
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.fleet.adapters import Adapters
from control_plane.fleet.first_worker import FirstWorker
from control_plane.fleet.load_sharing import LoadSharing
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.fleet.worker_client import WorkerClient
from control_plane.fleet.worker_probes import WorkerProbes
from control_plane.fleet.worker_views import WorkerViews
from control_plane.intake.admission import Admission
from control_plane.intake.grammars import Grammars
from control_plane.intake.tokenization import Tokenizer
from control_plane.metrics.console_metrics import ConsoleCollector
from control_plane.metrics.loop_stall import watch_loop
from control_plane.metrics.placement_metrics import PlacementCollector
from control_plane.metrics.probe_server import Probes
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.metrics.service_metrics import ServiceCollector
from control_plane.metrics.trace_metrics import TraceCollector
from control_plane.metrics.worker_metrics import WorkerCollector
from control_plane.overview.service_overview import ServiceOverview
from control_plane.placement.index_queries import IndexQueries
from control_plane.placement.placer import Placer
from control_plane.placement.replicator import Replicator
from control_plane.pools.life import Pools
from control_plane.pools.load_following import PoolFollowing
from control_plane.prefix_index.followed_index import FollowedIndex
from control_plane.prefix_index.index_check import IndexCheck
from control_plane.server.admin_service import AdminService
from control_plane.server.router_service import RouterService
from control_plane.sessions.serving import StreamingSessions
from control_plane.tracing.traces import Traces

ROUTER_SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
# Whether the process is alive, whatever it can serve; the other names say whether it is ready for requests.
LIVENESS = "liveness"
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Everything that one router is made of; `control_plane.server.composition` makes it."""

    server: grpc.aio.Server
    door: Door
    router: RouterService
    first_worker: FirstWorker
    overview: ServiceOverview
    admin: AdminService
    # The same, for the console.
    calls: AdminCalls
    admission: Admission
    tokenizer: Tokenizer
    grammars: Grammars
    dispatcher: Dispatcher
    sessions: StreamingSessions
    placer: Placer
    replicator: Replicator
    prefixes: FollowedIndex
    check: IndexCheck
    queries: IndexQueries
    membership: Membership
    sharing: LoadSharing
    follower: RegistryFollower
    adapters: Adapters
    client: WorkerClient
    probes: WorkerProbes
    views: WorkerViews
    metrics: RouterMetrics
    traces: Traces
    # Where their controller runs beside this router.
    pools: Pools | None
    load_following: PoolFollowing | None


class RouterServer:
    """Starts, serves and stops the parts of one router: `start`, then `stop`; `address` is set in between."""

    def __init__(self, config: RachisConfig, parts: RouterParts, *, loop_look_s: float) -> None:
        self._config = config
        self.parts = parts
        self._loop_look_s = loop_look_s
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._background = BackgroundTasks()
        self._stopping = False
        self.address = ""

    @property
    def is_open(self) -> bool:
        """Nobody is asked for a key."""
        return self.parts.door.access.is_open

    @property
    def membership(self) -> Membership:
        return self.parts.membership

    @property
    def metrics(self) -> RouterMetrics:
        return self.parts.metrics

    @property
    def workers_changed(self) -> asyncio.Condition:
        """Notified whenever placement sees other workers than before."""
        return self.parts.follower.changed

    async def follow_load(self) -> None:
        """Lets the pools follow it where they are configured to, until cancelled."""
        if self.parts.load_following is not None:
            await self.parts.load_following.run()

    async def start(self) -> None:
        """Listens. Health says SERVING once a decode worker is ready. Raises StartError when the port is taken."""
        parts, section = self.parts, self._config.router
        self.address = f"{section.host}:{self._listen()}"
        loop = asyncio.get_running_loop()
        console = ConsolePages(parts.calls, loop)
        self._register_collectors(loop, console)
        try:
            parts.metrics.serve(section.host, section.metrics_port, Probes(loop, self._not_ready), console)
        except OSError as error:
            place = f"{section.host}:{section.metrics_port}"
            raise StartError(
                f"cannot serve metrics on {place}: {error.strerror}", field="router.metrics_port"
            ) from None
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await parts.tokenizer.load()
        await parts.adapters.start()
        await parts.server.start()
        self._background.start(parts.door.follow())
        self._background.start(parts.follower.follow())
        self._background.start(parts.sharing.follow())
        self._background.start(parts.adapters.follow())
        self._background.start(parts.probes.run())
        self._background.start(parts.overview.follow())
        self._background.start(watch_loop(parts.metrics.loop_came_back, self._loop_look_s))
        self._background.start(self._watch_health())
        self._background.start(parts.prefixes.claims.follow())
        self._background.start(parts.prefixes.accesses.follow())
        if self._config.placement.replication and self._config.placement.policy == "hotness":
            self._background.start(parts.replicator.run())

    async def stop(self) -> None:
        """NOT_SERVING first, then no new requests, then those that run finish or are cut off."""
        parts = self.parts
        self._stopping = True
        await parts.first_worker.close()
        await self._background.cancel()
        await self._health.enter_graceful_shutdown()
        await parts.server.stop(grace=self._config.router.drain_timeout_s)
        # A scrape that runs still asks the workers.
        await asyncio.to_thread(parts.metrics.close)
        await parts.grammars.close()
        await parts.dispatcher.close()
        await parts.client.close()
        await parts.sharing.close()
        await parts.follower.close()
        await parts.adapters.close()
        await parts.prefixes.close()
        await parts.replicator.close()
        parts.door.close()
        parts.traces.close()

    def _listen(self) -> int:
        """Puts the services on the server; returns its port."""
        parts, section = self.parts, self._config.router
        router_pb2_grpc.add_RouterServiceServicer_to_server(parts.router, parts.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(parts.admin, parts.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, parts.server)
        reflection.enable_server_reflection(
            (ROUTER_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), parts.server
        )
        wanted = f"{section.host}:{section.port}"
        try:
            if self._config.security.certificate_file is None:
                return parts.server.add_insecure_port(wanted)
            return parts.server.add_secure_port(wanted, Certificates(self._config.security).credentials())
        except RuntimeError:
            raise StartError(
                f"cannot listen on {wanted}; is another service running there?", field="router.port"
            ) from None

    def _register_collectors(self, loop: asyncio.AbstractEventLoop, console: ConsolePages) -> None:
        """What Prometheus reads off the parts, on their loop, whenever it asks."""
        parts, registry = self.parts, self.parts.metrics.registry
        registry.register(WorkerCollector(parts.views, loop))
        registry.register(ConsoleCollector(console.streams.counts))
        pools = parts.pools.status if parts.pools is not None else list
        refused = lambda: parts.door.access.refused  # noqa: E731
        registry.register(ServiceCollector(self._config, parts.overview.router, parts.probes, pools, refused, loop))
        if parts.traces.exporter is not None:
            registry.register(TraceCollector(parts.traces.exporter))
        untrue = lambda: parts.check.untrue  # noqa: E731
        registry.register(PlacementCollector(parts.queries.status, parts.placer.counts, parts.replicator, untrue, loop))

    def _not_ready(self) -> str:
        """Why no request is served, in a sentence; empty where they are."""
        if self._stopping:
            return "the service is stopping"
        is_usable = self.parts.membership.usable(wire.POOL_DECODE)
        return "" if is_usable else "no decode worker is usable: see `rachis status`"

    async def _watch_health(self) -> None:
        membership, changed = self.parts.membership, self.parts.follower.changed
        async with changed:
            while True:
                serving = bool(membership.usable(wire.POOL_DECODE))
                status = health_pb2.HealthCheckResponse
                await self._set_health(status.SERVING if serving else status.NOT_SERVING)
                self.parts.client.keep_only({member.registration.address for member in membership.members()})
                await changed.wait()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", ROUTER_SERVICE, ADMIN_SERVICE):
            await self._health.set(service, status)
