"""AdminService: what runs, what is in force, taking workers out of rotation, and why requests go where they go."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import admin_pb2_grpc
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig, masked
from cluster_core.errors import InvalidInputError, NotFoundError, NotSupportedError, RachisError
from cluster_core.event_log import LEVELS
from cluster_wire import calls
from cluster_wire.calls import Context
from control_plane.fleet.adapters import Adapters
from control_plane.fleet.membership import Membership
from control_plane.fleet.service_logs import ServiceLogs
from control_plane.fleet.worker_client import WorkerClient
from control_plane.fleet.worker_views import WorkerViews
from control_plane.model.worker_snapshot import Pool
from control_plane.overview.service_overview import ServiceOverview
from control_plane.placement.index_queries import IndexQueries
from control_plane.pools.life import Pools
from control_plane.pools.pool_sections import POOL_NAMES

STATUS_TIMEOUT_S = 2.0


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """What operators ask of one router, and of the pools where their controller runs beside it."""

    def __init__(
        self,
        loaded: LoadedConfig,
        membership: Membership,
        client: WorkerClient,
        views: WorkerViews,
        overview: ServiceOverview,
        queries: IndexQueries,
        pools: Pools | None,
        adapters: Adapters,
    ) -> None:
        """pools: None where their controller runs elsewhere."""
        self._loaded = loaded
        self._membership = membership
        self._client = client
        self._views = views
        self._overview = overview
        self._queries = queries
        self._pools = pools
        self._adapters = adapters
        self._logs = ServiceLogs(membership, client)

    async def ListWorkers(self, request: admin.ListWorkersRequest, context: Context) -> admin.ListWorkersResponse:
        views = await self._views.gather(STATUS_TIMEOUT_S, request)
        return admin.ListWorkersResponse(workers=views)

    async def DrainWorker(self, request: admin.DrainWorkerRequest, context: Context) -> admin.DrainWorkerResponse:
        state = await self._set_draining(request.worker_id, True, context)
        return admin.DrainWorkerResponse(state=state)

    async def ResumeWorker(self, request: admin.ResumeWorkerRequest, context: Context) -> admin.ResumeWorkerResponse:
        state = await self._set_draining(request.worker_id, False, context)
        return admin.ResumeWorkerResponse(state=state)

    async def GetPools(self, request: admin.GetPoolsRequest, context: Context) -> admin.GetPoolsResponse:
        return admin.GetPoolsResponse(pools=self._overview.pools())

    async def ScalePools(
        self, request: admin.ScalePoolsRequest, context: Context
    ) -> AsyncIterator[admin.ScalePoolsResponse]:
        sizes: dict[Pool, int] = {}
        for pool, name in POOL_NAMES.items():
            if request.HasField(f"{name}_workers"):  # type: ignore[arg-type]
                sizes[pool] = getattr(request, f"{name}_workers")
        async with _answering(context), aclosing(self._controlled_pools().scale(sizes)) as events:
            async for event in events:
                yield admin.ScalePoolsResponse(event=event)

    async def RemoveWorker(
        self, request: admin.RemoveWorkerRequest, context: Context
    ) -> AsyncIterator[admin.RemoveWorkerResponse]:
        async with (
            _answering(context),
            aclosing(self._controlled_pools().remove(request.worker_id, force=request.force)) as events,
        ):
            async for event in events:
                yield admin.RemoveWorkerResponse(event=event)

    async def RestartWorkers(
        self, request: admin.RestartWorkersRequest, context: Context
    ) -> AsyncIterator[admin.RestartWorkersResponse]:
        async with _answering(context), aclosing(self._controlled_pools().restart(list(request.worker_ids))) as events:
            async for event in events:
                yield admin.RestartWorkersResponse(event=event)

    def _controlled_pools(self) -> Pools:
        if self._pools is None:
            raise NotSupportedError("the controller of the pools does not run with this router")
        return self._pools

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
        return await self._overview.asked_router()

    async def GetOverview(self, request: admin.GetOverviewRequest, context: Context) -> admin.GetOverviewResponse:
        return self._overview.now(request.workers)

    async def WatchOverview(
        self, request: admin.WatchOverviewRequest, context: Context
    ) -> AsyncIterator[admin.WatchOverviewResponse]:
        async with aclosing(self._overview.watch(request.workers)) as overviews:
            async for overview in overviews:
                yield admin.WatchOverviewResponse(overview=overview)

    async def GetLogs(self, request: admin.GetLogsRequest, context: Context) -> admin.GetLogsResponse:
        async with _answering(context):
            if request.query.level not in ("", *LEVELS):
                raise InvalidInputError(f"must be one of {', '.join(LEVELS)}, or empty", field="query.level")
            return await self._logs.read(request)

    async def GetHistory(self, request: admin.GetHistoryRequest, context: Context) -> admin.GetHistoryResponse:
        return self._overview.history()

    async def GetHottestPrefixes(
        self, request: admin.GetHottestPrefixesRequest, context: Context
    ) -> admin.GetHottestPrefixesResponse:
        return self._queries.hottest(request)

    async def LookupPrefix(self, request: admin.LookupPrefixRequest, context: Context) -> admin.LookupPrefixResponse:
        async with _answering(context):
            return await self._queries.lookup(request, self._queries.rules.access.identity(context))

    async def ExplainPlacement(
        self, request: admin.ExplainPlacementRequest, context: Context
    ) -> admin.ExplainPlacementResponse:
        async with _answering(context):
            return await self._queries.explain(request, self._queries.rules.access.identity(context))

    async def ListPlacements(
        self, request: admin.ListPlacementsRequest, context: Context
    ) -> admin.ListPlacementsResponse:
        async with _answering(context):
            return self._queries.placements(request, self._queries.rules.access.identity(context))

    async def GetTrace(self, request: admin.GetTraceRequest, context: Context) -> admin.GetTraceResponse:
        async with _answering(context):
            return self._queries.trace(request, self._queries.rules.access.identity(context))

    async def ListRequests(self, request: admin.ListRequestsRequest, context: Context) -> admin.ListRequestsResponse:
        async with _answering(context):
            return self._queries.requests(request, self._queries.rules.access.identity(context))

    async def CheckIndex(self, request: admin.CheckIndexRequest, context: Context) -> admin.CheckIndexResponse:
        return await self._queries.check()

    async def GetIndexStatus(
        self, request: admin.GetIndexStatusRequest, context: Context
    ) -> admin.GetIndexStatusResponse:
        return self._queries.status()

    async def ListAdapters(self, request: admin.ListAdaptersRequest, context: Context) -> admin.ListAdaptersResponse:
        async with _answering(context):
            return self._adapters.views()

    async def LoadAdapter(self, request: admin.LoadAdapterRequest, context: Context) -> admin.LoadAdapterResponse:
        async with _answering(context):
            adapter, worker_ids = await self._adapters.load(request.name, request.path)
            return admin.LoadAdapterResponse(adapter=adapter, worker_ids=worker_ids)

    async def UnloadAdapter(self, request: admin.UnloadAdapterRequest, context: Context) -> admin.UnloadAdapterResponse:
        async with _answering(context):
            return admin.UnloadAdapterResponse(left_at=await self._adapters.unload(request.name))

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
        await context.abort(calls.status_code(error), str(error), calls.trailing_metadata(error))
        raise
