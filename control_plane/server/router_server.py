"""One router process: its gRPC servers, metrics and what runs beside them, in one order of starting and stopping."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from grpc_health.v1 import health, health_pb2
from rachis.v1 import worker_pb2 as wire

from cluster_configs.listening import administration_of, is_loopback, metrics_of
from cluster_configs.schema import RachisConfig
from cluster_core.background import BackgroundTasks
from cluster_core.errors import StartError
from cluster_wire.http_status import http_status
from control_plane.access.access import AUTHORIZATION
from control_plane.access.door import Door
from control_plane.access.doors import ADMIN_SERVICE, ROUTER_SERVICE
from control_plane.access.roles import METRICS_NEEDS
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
from control_plane.intake.arrivals import Arrivals
from control_plane.intake.grammars import Grammars
from control_plane.intake.shared_rates import SharedRates
from control_plane.intake.tokenization import Tokenizer
from control_plane.metrics.console_metrics import ConsoleCollector
from control_plane.metrics.loop_stall import watch_loop
from control_plane.metrics.placement_metrics import PlacementCollector
from control_plane.metrics.probe_server import Probes, Said, ShownBy
from control_plane.metrics.rate_metrics import RateCollector
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
from control_plane.server.grpc_server import GrpcServer, RouterServicers
from control_plane.server.router_service import RouterService
from control_plane.sessions.serving import StreamingSessions
from control_plane.tracing.traces import Traces

# Whether the process is alive, whatever it can serve; the other names say whether it is ready for requests.
LIVENESS = "liveness"


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Everything that one router is made of; `control_plane.server.composition` makes it."""

    # One for each door; that of administration comes last.
    servers: tuple[GrpcServer, ...]
    door: Door
    router: RouterService
    first_worker: FirstWorker
    overview: ServiceOverview
    admin: AdminService
    # The same, for the console.
    calls: AdminCalls
    admission: Admission
    tokenizer: Tokenizer
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
    arrivals: Arrivals
    # Where their controller runs beside this router.
    pools: Pools | None
    load_following: PoolFollowing | None

    @property
    def rates(self) -> SharedRates:
        return self.arrivals.rates

    @property
    def grammars(self) -> Grammars:
        return self.arrivals.grammars

    @property
    def traces(self) -> Traces:
        return self.arrivals.traces


class RouterServer:
    """Starts, serves and stops the parts of one router: `start`, then `stop`; addresses are set in between."""

    def __init__(self, config: RachisConfig, parts: RouterParts, *, loop_look_s: float) -> None:
        self._config = config
        self.parts = parts
        self._loop_look_s = loop_look_s
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._background = BackgroundTasks()
        self._stopping = False
        # Of prompts and sessions, and of administration: the same where that is not apart.
        self.address = self.admin_address = ""

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
        """Listens. Health says SERVING once a decode worker is ready. A port that others share comes last: who calls is
        served by those until this one knows a worker, for which it waits as a request would.

        Raises StartError when a port is taken.
        """
        parts, shares = self.parts, self._config.router.share_port
        await parts.tokenizer.load()
        await parts.adapters.start()
        self._serve_metrics(asyncio.get_running_loop())
        own = parts.servers[-1:] if shares else parts.servers
        addresses = [self._listen(server) for server in own]
        self.address, self.admin_address = addresses[0], addresses[-1]
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        for server in own:
            await server.start()
        self._start_background()
        if shares:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._worker_known(), self._config.router.queue_timeout_s)
            self.address = self._listen(parts.servers[0])
            await parts.servers[0].start()

    def _listen(self, server: GrpcServer) -> str:
        servicers = RouterServicers(self.parts.router, self.parts.admin, self._health)
        return server.listen(servicers, self._config.security)

    async def _worker_known(self) -> None:
        """Until a decode worker is usable."""
        async with self.parts.follower.changed:
            await self.parts.follower.changed.wait_for(lambda: bool(self.parts.membership.usable(wire.POOL_DECODE)))

    def _start_background(self) -> None:
        """What runs beside the servers."""
        parts = self.parts
        self._background.start(parts.door.follow())
        self._background.start(parts.follower.follow())
        self._background.start(parts.sharing.follow())
        self._background.start(parts.adapters.follow())
        self._background.start(parts.rates.follow())
        self._background.start(parts.probes.run())
        self._background.start(parts.overview.follow())
        self._background.start(watch_loop(parts.metrics.loop_came_back, self._loop_look_s))
        self._background.start(self._watch_health())
        self._background.start(parts.prefixes.claims.follow())
        self._background.start(parts.prefixes.accesses.follow())
        if self._config.placement.replication and self._config.placement_policy == "hotness":
            self._background.start(parts.replicator.run())

    async def stop(self) -> None:
        """NOT_SERVING first, then no new requests, then those that run finish or are cut off."""
        parts = self.parts
        self._stopping = True
        await parts.first_worker.close()
        await self._background.cancel()
        await self._health.enter_graceful_shutdown()
        grace_s = self._config.router.drain_timeout_s
        await asyncio.gather(*(server.stop(grace_s) for server in parts.servers))
        # A scrape that runs still asks the workers.
        await asyncio.to_thread(parts.metrics.close)
        await parts.grammars.close()
        await parts.dispatcher.close()
        await parts.client.close()
        await parts.sharing.close()
        await parts.follower.close()
        await parts.adapters.close()
        await parts.rates.close()
        await parts.prefixes.close()
        await parts.replicator.close()
        parts.door.close()
        parts.traces.close()

    def _serve_metrics(self, loop: asyncio.AbstractEventLoop) -> None:
        """And probes, and the console. Raises StartError."""
        parts, at = self.parts, metrics_of(self._config.router)
        administration = administration_of(self._config.router)
        is_local = administration is None or is_loopback(administration.host)
        console = ConsolePages(parts.calls, loop, is_local=is_local)
        self._register_collectors(loop, console)
        refusal = self._scrape_refusal if self._config.security.metrics_need_key else None
        try:
            parts.metrics.serve(at.host, at.port, Probes(loop, self._not_ready, refusal), console)
        except OSError as error:
            sentence = f"cannot serve metrics on {at}: {error.strerror}"
            raise StartError(sentence, field="router.metrics_port") from None

    async def _scrape_refusal(self, shown: ShownBy) -> Said | None:
        """Why somebody may not read the metrics."""
        metadata = ((AUTHORIZATION, shown.authorization),) if shown.authorization is not None else ()
        error = await self.parts.door.refusal(metadata, shown.certificate, METRICS_NEEDS["/metrics"])
        return (HTTPStatus(http_status(error.status)), str(error)) if error is not None else None

    def _register_collectors(self, loop: asyncio.AbstractEventLoop, console: ConsolePages) -> None:
        """What Prometheus reads off the parts, on their loop, whenever it asks."""
        parts, registry = self.parts, self.parts.metrics.registry
        registry.register(WorkerCollector(parts.views, loop))
        registry.register(ConsoleCollector(console.streams.counts))
        registry.register(RateCollector(parts.rates, loop))
        pools = parts.pools.status if parts.pools is not None else list
        refused = lambda: parts.door.access.refused  # noqa: E731
        registry.register(ServiceCollector(self._config, parts.overview.router, parts.probes, pools, refused, loop))
        if parts.traces.exporter is not None:
            registry.register(TraceCollector(parts.traces.exporter))
        untrue = lambda: parts.check.untrue  # noqa: E731
        registry.register(PlacementCollector(parts.queries.status, parts.placer, parts.replicator, untrue, loop))

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
