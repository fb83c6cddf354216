"""The composition root of a router: every part is made here, once, from the configuration and the ports it is given."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import grpc
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig
from cluster_configs.schema import RachisConfig, SecuritySection
from cluster_core import versions
from cluster_core.clock import monotonic_s
from cluster_core.ids import RequestId
from cluster_wire.redis_client import RedisClient
from control_plane.access.access import Access, access_of
from control_plane.access.audit import AuditLog
from control_plane.access.certificates import Certificates, page_context
from control_plane.access.door import Door
from control_plane.console.admin_calls import AdminCalls
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.journey import JourneyLimits
from control_plane.fleet.adapters import Adapters
from control_plane.fleet.fencing import Fence
from control_plane.fleet.first_worker import FirstWorker
from control_plane.fleet.load_sharing import LoadSharing
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.fleet.vitality import VITALITY_TIMING, VitalityTiming
from control_plane.fleet.worker_client import WorkerClient
from control_plane.fleet.worker_probes import WorkerProbes
from control_plane.fleet.worker_views import WorkerViews
from control_plane.intake.admission import Admission
from control_plane.intake.arrivals import Arrivals
from control_plane.intake.grammars import GrammarCompiler, GrammarProcess, Grammars
from control_plane.intake.shared_rates import SharedRates
from control_plane.intake.tokenization import Tokenizer
from control_plane.metrics.loop_stall import LOOK_S
from control_plane.metrics.probe_server import ProbeServer
from control_plane.metrics.router_metrics import MakeEndpoint, RouterMetrics
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.overview.service_overview import ServiceOverview, Sources
from control_plane.placement.configured_placer import configured_placer
from control_plane.placement.explanation import decisions_on
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.index_queries import IndexQueries, QueryRules
from control_plane.placement.placer import Placer
from control_plane.placement.replication import Replication
from control_plane.placement.replicator import Replicator
from control_plane.pools.actors import Actors
from control_plane.pools.kept_sizes import KeptSizes
from control_plane.pools.life import Pools
from control_plane.pools.load_following import PoolFollowing
from control_plane.pools.pool_sections import sections
from control_plane.pools.timing import POOL_TIMING, PoolTiming
from control_plane.prefix_index.followed_index import FollowedIndex
from control_plane.prefix_index.index_check import BETWEEN_LOOKS_S, SETTLE_S, IndexCheck
from control_plane.server.admin_service import AdminService
from control_plane.server.grpc_server import make_servers
from control_plane.server.router_server import RouterParts, RouterServer
from control_plane.server.router_service import RouterService
from control_plane.server.router_status import RouterStatus
from control_plane.sessions.serving import StreamingSessions
from control_plane.tracing.export import traces_of
from control_plane.tracing.traces import Traces

# How long any part waits for an answer of Redis.
_REDIS_TIMEOUT_S = 2.0
# A worker is sent the tokens of what came as text: so many times as many bytes at most.
_WORKER_MESSAGE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """By what a router reaches the world. All but Redis have what production uses as their default."""

    # Makes a client of the service's Redis that waits so many seconds for an answer. Each part closes its own.
    redis: Callable[[float], RedisClient]
    # The processes of the workers, where their controller runs beside this router.
    actors: Actors | None = None
    # Seconds on a clock that never goes back.
    now_s: Callable[[], float] = monotonic_s
    # Of the model in a folder.
    tokenizer: Callable[[str], Tokenizer] = Tokenizer
    # A process that compiles grammars: of the model in a folder, for a vocabulary of so many tokens, in so many MiB.
    grammar_compiler: Callable[[str, int, int], Awaitable[GrammarCompiler]] = GrammarProcess.start
    # gRPC: makes the router's servers, and a channel to a worker; None: as the service's secret has it.
    server: Callable[..., grpc.aio.Server] = grpc.aio.server
    channel: Callable[..., grpc.aio.Channel] | None = None
    # Who may call, by files of this host.
    access: Callable[[SecuritySection], Access] = access_of
    # Serves metrics and probes.
    endpoint: MakeEndpoint = ProbeServer
    # The seeded choice of placement among equals.
    rng: Callable[[int], Random] = Random
    # What a request is on its way.
    lifecycle: Callable[[RequestId], RequestLifecycle] = RequestLifecycle
    job: Callable[..., Job] = Job


@dataclass(frozen=True, slots=True)
class RouterTiming:
    """Intervals that are not configured; tests have shorter ones."""

    pools: PoolTiming = POOL_TIMING
    # Of a check of the index: how long differences may be on their way, and from one look to the next.
    check_settle_s: float = SETTLE_S
    check_between_s: float = BETWEEN_LOOKS_S
    # Whether workers live is looked at, and asked.
    vitality: VitalityTiming = VITALITY_TIMING
    # How often it is looked how late the event loop is.
    loop_look_s: float = LOOK_S


ROUTER_TIMING = RouterTiming()


def build_router(
    loaded: LoadedConfig, service_id: str, ports: RouterPorts, timing: RouterTiming = ROUTER_TIMING
) -> RouterServer:
    """A router that has not started; nothing is set on its parts after this. Raises ConfigError for a bad file."""
    config = loaded.config
    door, membership = _door(config.security, ports), Membership(versions=versions.installed())
    client = _client(config, door, ports)
    views = WorkerViews(membership, client)
    prefixes = FollowedIndex(config, lambda: ports.redis(_REDIS_TIMEOUT_S), service_id, membership, ports.now_s)
    adapters = _adapters(config, service_id, membership, client, ports)
    follower = _follower(config, service_id, membership, prefixes, door.access, ports)
    placer = configured_placer(config, service_id, membership, _index_ports(prefixes), ports.rng, ports.now_s)
    probes = WorkerProbes(membership, client, follower.changed, timing.vitality, ports.now_s)
    dispatcher = _dispatcher(config, membership, follower, client, placer, probes, ports)
    metrics, admission = _metrics(config, ports), _admission(config, door.access, ports)
    tokenizer, first_worker = ports.tokenizer(config.model.resolved_path), _first_worker(config, membership, follower)
    rates = _rates(service_id, membership, prefixes.router_id, door.access, ports)
    arrivals = _arrivals(config, rates, adapters, door.access, placer, ports)
    sessions = StreamingSessions(
        first_worker, dispatcher, client, admission, tokenizer, config.streaming, metrics, arrivals
    )
    router = RouterService(first_worker, dispatcher, admission, tokenizer, sessions, metrics, arrivals)
    check = _check(membership, prefixes, client, ports, timing)
    rules = QueryRules(door.access, adapters.known, arrivals.traces)
    queries = _queries(config, membership, prefixes, placer, tokenizer, check, rules)
    pools = _pools(config, service_id, membership, follower, client, ports, timing.pools)
    status = RouterStatus(service_id, follower, admission, router, dispatcher, metrics, placer, ports.now_s)
    overview = _overview(config, membership, arrivals.traces, status, pools, queries, ports)
    service = AdminService(loaded, membership, client, views, overview, queries, pools, adapters)
    parts = RouterParts(
        door=door,
        membership=membership,
        sharing=_sharing(config, service_id, membership, prefixes.router_id, placer, ports),
        follower=follower,
        adapters=adapters,
        client=client,
        probes=probes,
        views=views,
        prefixes=prefixes,
        placer=placer,
        replicator=_replicator(config, service_id, prefixes, placer, client, ports),
        dispatcher=dispatcher,
        sessions=sessions,
        admission=admission,
        tokenizer=tokenizer,
        metrics=metrics,
        arrivals=arrivals,
        check=check,
        queries=queries,
        router=router,
        first_worker=first_worker,
        overview=overview,
        admin=service,
        calls=AdminCalls(door, router, service),
        pools=pools,
        load_following=_load_following(config, pools, membership, metrics, admission, follower, ports, timing.pools),
        servers=make_servers(ports.server, config, membership, door),
    )
    return RouterServer(config, parts, loop_look_s=timing.loop_look_s)


def _door(section: SecuritySection, ports: RouterPorts) -> Door:
    audit = AuditLog(Path(section.audit_file) if section.audit_file is not None else None)
    return Door(ports.access(section), audit)


def _metrics(config: RachisConfig, ports: RouterPorts) -> RouterMetrics:
    security = config.security
    tls = Certificates(security, page_context).current if security.metrics_tls else None
    return RouterMetrics(config.objectives.by_class, ports.endpoint, ports.now_s, tls)


def _client(config: RachisConfig, door: Door, ports: RouterPorts) -> WorkerClient:
    message_bytes = (config.router.max_message_mib << 20) * _WORKER_MESSAGE_FACTOR
    return WorkerClient(message_bytes, ports.channel or door.access.worker_channel, door.access.as_member)


def _adapters(
    config: RachisConfig, service_id: str, membership: Membership, client: WorkerClient, ports: RouterPorts
) -> Adapters:
    redis, refresh_s = ports.redis(_REDIS_TIMEOUT_S), config.redis.refresh_s
    return Adapters(redis, service_id, membership, client, refresh_s=refresh_s)


def _rates(service_id: str, membership: Membership, router_id: str, access: Access, ports: RouterPorts) -> SharedRates:
    redis = ports.redis(_REDIS_TIMEOUT_S)
    return SharedRates(redis, service_id, access.limits_of, membership.others, router_id, ports.now_s)


def _arrivals(
    config: RachisConfig, rates: SharedRates, adapters: Adapters, access: Access, placer: Placer, ports: RouterPorts
) -> Arrivals:
    limits, parts = config.router, (_grammars(config, ports), rates, ports.now_s, ports.lifecycle, ports.job)
    decisions = partial(decisions_on, placer.log, config.placement_policy)
    traces = traces_of(config.tracing, config.objectives.by_class, decisions, ports.now_s)
    return Arrivals(limits.request_timeout_s, limits.send_timeout_s, *parts, adapters.known, access, traces)


def _first_worker(config: RachisConfig, membership: Membership, follower: RegistryFollower) -> FirstWorker:
    section = config.router
    wait_s = min(section.queue_timeout_s, section.request_timeout_s)
    return FirstWorker(membership, follower.changed, wait_s, section.max_queued_requests)


def _follower(
    config: RachisConfig,
    service_id: str,
    membership: Membership,
    prefixes: FollowedIndex,
    access: Access,
    ports: RouterPorts,
) -> RegistryFollower:
    return RegistryFollower(
        ports.redis(_REDIS_TIMEOUT_S),
        service_id,
        membership,
        refresh_s=config.redis.refresh_s,
        worker_lease_s=config.redis.worker_lease_s,
        # A worker whose lease has ended holds nothing from then on.
        on_read=prefixes.claims.membership_changed,
        unsealed=access.unsealed,
        now_s=ports.now_s,
    )


def _admission(config: RachisConfig, access: Access, ports: RouterPorts) -> Admission:
    limits = config.router
    return Admission(
        limits.max_in_flight_requests,
        limits.max_queued_requests,
        limits.queue_timeout_s,
        ports.now_s,
        limits.max_prompt_mib << 20,
        limits.tenant_share,
        limits.best_effort_share,
        lambda tenant: access.limits_of(tenant).weight,
    )


def _grammars(config: RachisConfig, ports: RouterPorts) -> Grammars:
    limits, folder = config.router, config.model.resolved_path

    def start(model: wire.ModelInfo) -> Awaitable[GrammarCompiler]:
        return ports.grammar_compiler(folder, model.vocabulary_size, limits.grammar_memory_mib)

    wait_s = min(limits.queue_timeout_s, limits.request_timeout_s)
    return Grammars(start, timeout_s=limits.grammar_timeout_s, wait_s=wait_s)


def _sharing(
    config: RachisConfig, service_id: str, membership: Membership, router_id: str, placer: Placer, ports: RouterPorts
) -> LoadSharing:
    redis, every_s, roles = ports.redis(_REDIS_TIMEOUT_S), config.redis.share_loads_s, placer.told_roles
    return LoadSharing(
        redis, service_id, membership, router_id=router_id, every_s=every_s, roles=roles, now_s=ports.now_s
    )


def _index_ports(prefixes: FollowedIndex) -> IndexPorts:
    return IndexPorts(
        prefixes.index,
        is_stale=prefixes.claims.is_stale,
        now_s=prefixes.accesses.now_s,
        record_access=prefixes.accesses.record,
    )


def _dispatcher(
    config: RachisConfig,
    membership: Membership,
    follower: RegistryFollower,
    client: WorkerClient,
    placer: Placer,
    probes: WorkerProbes,
    ports: RouterPorts,
) -> Dispatcher:
    return Dispatcher(
        membership,
        follower.changed,
        client,
        placer,
        JourneyLimits(
            prefill_attempts=config.router.prefill_attempts,
            worker_wait_s=config.router.queue_timeout_s,
            handoff_deadline_s=config.handoff.deadline_s,
            max_migrations=config.router.max_migrations,
        ),
        probes,
        ports.now_s,
    )


def _replicator(
    config: RachisConfig,
    service_id: str,
    prefixes: FollowedIndex,
    placer: Placer,
    client: WorkerClient,
    ports: RouterPorts,
) -> Replicator:
    plan = Replication(config.placement.replication_load, config.placement.replicas)
    redis = ports.redis(_REDIS_TIMEOUT_S)
    return Replicator(redis, service_id, prefixes.router_id, placer, client, plan, now_s=ports.now_s)


def _check(
    membership: Membership, prefixes: FollowedIndex, client: WorkerClient, ports: RouterPorts, timing: RouterTiming
) -> IndexCheck:
    return IndexCheck(
        membership,
        prefixes.index,
        client.prefix_claims,
        settle_s=timing.check_settle_s,
        between_s=timing.check_between_s,
        now_s=ports.now_s,
    )


def _queries(
    config: RachisConfig,
    membership: Membership,
    prefixes: FollowedIndex,
    placer: Placer,
    tokenizer: Tokenizer,
    check: IndexCheck,
    rules: QueryRules,
) -> IndexQueries:
    health, policy = prefixes.claims.health, config.placement_policy
    index = _index_ports(prefixes)
    return IndexQueries(membership, index, placer, tokenizer, check, health=health, policy=policy, rules=rules)


def _overview(
    config: RachisConfig,
    membership: Membership,
    traces: Traces,
    status: RouterStatus,
    pools: Pools | None,
    queries: IndexQueries,
    ports: RouterPorts,
) -> ServiceOverview:
    sources = Sources(status.to_wire, status.asked, pools.status if pools is not None else list, queries.status)
    return ServiceOverview(config, membership, traces, sources, ports.now_s)


def _pools(
    config: RachisConfig,
    service_id: str,
    membership: Membership,
    follower: RegistryFollower,
    client: WorkerClient,
    ports: RouterPorts,
    timing: PoolTiming,
) -> Pools | None:
    if ports.actors is None:
        return None
    sizes = {pool: section.workers for pool, section in sections(config.pools).items()}
    fence = Fence(ports.redis(_REDIS_TIMEOUT_S), service_id)
    kept = KeptSizes(ports.redis(_REDIS_TIMEOUT_S), service_id, sizes, lambda: follower.losses)
    return Pools(config, ports.actors, membership, client, fence, kept, timing, ports.now_s)


def _load_following(
    config: RachisConfig,
    pools: Pools | None,
    membership: Membership,
    metrics: RouterMetrics,
    admission: Admission,
    follower: RegistryFollower,
    ports: RouterPorts,
    timing: PoolTiming,
) -> PoolFollowing | None:
    if pools is None:
        return None
    of_router = metrics.recent_ttft, lambda: admission.short_of_slots, timing, ports.now_s, lambda: follower.connected
    return PoolFollowing(config, pools, membership, *of_router)
