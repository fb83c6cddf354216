"""AdminService: what runs, what is in force, taking workers out of rotation, and why requests go where they go."""

import importlib.metadata
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from rachis import wire as conventions
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import admin_pb2_grpc
from rachis.v1 import worker_pb2 as wire
from rachis.wire import Context

from cluster_configs.loading import LoadedConfig, masked
from cluster_core.clock import cpu_s, monotonic_s
from cluster_core.errors import NotFoundError, NotSupportedError, RachisError
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.fleet.worker_client import WorkerClient
from control_plane.fleet.worker_views import WorkerViews
from control_plane.intake.admission import Admission
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.index_queries import IndexQueries
from control_plane.pools.life import Pools
from control_plane.server.router_service import RouterService

STATUS_TIMEOUT_S = 2.0


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """pools: set where the service's controller runs in this process, before it serves."""

    pools: Pools | None = None

    def __init__(
        self,
        loaded: LoadedConfig,
        service_id: str,
        membership: Membership,
        follower: RegistryFollower,
        client: WorkerClient,
        views: WorkerViews,
        router: RouterService,
        dispatcher: Dispatcher,
        admission: Admission,
        metrics: RouterMetrics,
        queries: IndexQueries,
    ) -> None:
        self._loaded = loaded
        self._service_id = service_id
        self._membership = membership
        self._follower = follower
        self._client = client
        self._views = views
        self._router = router
        self._dispatcher = dispatcher
        self._admission = admission
        self._metrics = metrics
        self._queries = queries
        self._started_s = monotonic_s()

    async def ListWorkers(self, request: admin.ListWorkersRequest, context: Context) -> admin.ListWorkersResponse:
        views = await self._views.gather(
            STATUS_TIMEOUT_S, hottest_prefixes=request.hottest_prefixes, batch_entries=request.batch_entries
        )
        return admin.ListWorkersResponse(workers=views)

    async def DrainWorker(self, request: admin.DrainWorkerRequest, context: Context) -> admin.DrainWorkerResponse:
        state = await self._set_draining(request.worker_id, True, context)
        return admin.DrainWorkerResponse(state=state)

    async def ResumeWorker(self, request: admin.ResumeWorkerRequest, context: Context) -> admin.ResumeWorkerResponse:
        state = await self._set_draining(request.worker_id, False, context)
        return admin.ResumeWorkerResponse(state=state)

    async def GetPools(self, request: admin.GetPoolsRequest, context: Context) -> admin.GetPoolsResponse:
        return admin.GetPoolsResponse(pools=self.pool_status())

    def pool_status(self) -> Sequence[admin.PoolStatus]:
        """None where the controller runs elsewhere."""
        return self.pools.status() if self.pools is not None else ()

    async def ScalePools(
        self, request: admin.ScalePoolsRequest, context: Context
    ) -> AsyncIterator[admin.ScalePoolsResponse]:
        sizes: dict[Pool, int] = {}
        if request.HasField("prefill_workers"):
            sizes[wire.POOL_PREFILL] = request.prefill_workers
        if request.HasField("decode_workers"):
            sizes[wire.POOL_DECODE] = request.decode_workers
        async with _answering(context), aclosing(self._pools().scale(sizes)) as events:
            async for event in events:
                yield admin.ScalePoolsResponse(event=event)

    async def RemoveWorker(
        self, request: admin.RemoveWorkerRequest, context: Context
    ) -> AsyncIterator[admin.RemoveWorkerResponse]:
        async with (
            _answering(context),
            aclosing(self._pools().remove(request.worker_id, force=request.force)) as events,
        ):
            async for event in events:
                yield admin.RemoveWorkerResponse(event=event)

    async def RestartWorkers(
        self, request: admin.RestartWorkersRequest, context: Context
    ) -> AsyncIterator[admin.RestartWorkersResponse]:
        async with _answering(context), aclosing(self._pools().restart(list(request.worker_ids))) as events:
            async for event in events:
                yield admin.RestartWorkersResponse(event=event)

    def _pools(self) -> Pools:
        if self.pools is None:
            raise NotSupportedError("the controller of the pools does not run with this router")
        return self.pools

    async def GetEffectiveConfig(
        self, request: admin.GetEffectiveConfigRequest, context: Context
    ) -> admin.GetEffectiveConfigResponse:
        entries = (
            admin.ConfigEntry(key=entry.key, value=json.dumps(masked(entry.value)), source=entry.source)
            for entry in self._loaded.entries
        )
        return admin.GetEffectiveConfigResponse(entries=entries)

    async def GetRouterStatus(
        self, request: admin.GetRouterStatusRequest, context: Context
    ) -> admin.GetRouterStatusResponse:
        overhead = sorted(self._dispatcher.overhead_ms)
        return admin.GetRouterStatusResponse(
            version=importlib.metadata.version("rachis"),
            service_id=self._service_id,
            uptime_s=monotonic_s() - self._started_s,
            in_flight_requests=self._admission.in_flight,
            queued_requests=self._admission.queued,
            outcomes={state.value: count for state, count in self._router.outcomes.items()},
            registry_connected=self._follower.connected,
            overhead_p50_ms=_quantile(overhead, 0.5),
            overhead_p99_ms=_quantile(overhead, 0.99),
            cpu_s=cpu_s(),
            metrics_address=self._metrics.address,
        )

    async def GetHottestPrefixes(
        self, request: admin.GetHottestPrefixesRequest, context: Context
    ) -> admin.GetHottestPrefixesResponse:
        return self._queries.hottest(request)

    async def LookupPrefix(self, request: admin.LookupPrefixRequest, context: Context) -> admin.LookupPrefixResponse:
        async with _answering(context):
            return await self._queries.lookup(request)

    async def ExplainPlacement(
        self, request: admin.ExplainPlacementRequest, context: Context
    ) -> admin.ExplainPlacementResponse:
        async with _answering(context):
            return await self._queries.explain(request)

    async def CheckIndex(self, request: admin.CheckIndexRequest, context: Context) -> admin.CheckIndexResponse:
        return await self._queries.check()

    async def GetIndexStatus(
        self, request: admin.GetIndexStatusRequest, context: Context
    ) -> admin.GetIndexStatusResponse:
        return self._queries.status()

    async def _set_draining(self, worker_id: str, draining: bool, context: Context) -> wire.WorkerState.ValueType:
        async with _answering(context):
            member = self._membership.get(worker_id)
            if member is None:
                known = ", ".join(str(member.worker_id) for member in self._membership.members()) or "none"
                raise NotFoundError(f"no worker `{worker_id}`; there are: {known}", field="worker_id")
            grace_s = self._loaded.config.limits.session_grace_s
            return await self._client.set_draining(
                member.registration.address, draining, STATUS_TIMEOUT_S, move_sessions_after_s=grace_s
            )


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Turns the errors of our tree into statuses."""
    try:
        yield
    except RachisError as error:
        await context.abort(conventions.status_code(error), str(error), conventions.trailing_metadata(error))
        raise


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
