"""The overview of a service, put together from the parts of one router whenever somebody asks, and kept for an hour.

No worker is asked: what is told of workers is in their registrations. All who watch share one look a second, so that
what watching costs a router does not grow with those who watch.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from rachis.v1 import admin_pb2 as admin

from cluster_configs.schema import RachisConfig
from control_plane.fleet.membership import Member, Membership
from control_plane.overview.alerts import MOST_ALERTS, Sight, alerts_of
from control_plane.overview.history import INTERVAL_S, History
from control_plane.overview.rows import pool_sums, worker_rows
from control_plane.overview.times import recent_times, times_overview
from control_plane.pools.pool_sections import sections
from control_plane.tracing.traces import Traces

MOST_ROWS = 200
WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Sources:
    """What an overview is read off; each is called on the router's loop."""

    router: Callable[[], admin.GetRouterStatusResponse]
    asked_router: Callable[[], Awaitable[admin.GetRouterStatusResponse]]
    pools: Callable[[], Sequence[admin.PoolStatus]]
    index: Callable[[], admin.GetIndexStatusResponse]


@dataclass(frozen=True, slots=True)
class _Look:
    """overview: without workers. rows: of all of them, in the order in which they are told."""

    overview: admin.GetOverviewResponse
    rows: Sequence[admin.WorkerRow]

    def told(self, workers: int) -> admin.GetOverviewResponse:
        listed = self.rows[: min(workers, MOST_ROWS)]
        told = admin.GetOverviewResponse(workers=listed, unlisted_workers=len(self.rows) - len(listed))
        told.MergeFrom(self.overview)
        return told


class ServiceOverview:
    """Of one router. `follow` keeps the history until cancelled."""

    def __init__(
        self,
        config: RachisConfig,
        membership: Membership,
        traces: Traces,
        sources: Sources,
        now_s: Callable[[], float],
        watch_interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        self._config = config
        self._membership = membership
        self._traces = traces
        self._sources = sources
        self._now_s = now_s
        self._watch_interval_s = watch_interval_s
        self._history = History()
        self._shared: tuple[float, _Look] | None = None

    def router(self) -> admin.GetRouterStatusResponse:
        return self._sources.router()

    async def asked_router(self) -> admin.GetRouterStatusResponse:
        """With what others have to be asked for."""
        return await self._sources.asked_router()

    def pools(self) -> Sequence[admin.PoolStatus]:
        return self._sources.pools()

    def now(self, workers: int) -> admin.GetOverviewResponse:
        """workers: so many are told one by one."""
        return self._look().told(workers)

    async def watch(self, workers: int) -> AsyncGenerator[admin.GetOverviewResponse, None]:
        """As it stands, at most once a second, until the reader has seen enough."""
        while True:
            yield self._recent_look().told(workers)
            await asyncio.sleep(self._watch_interval_s)

    def history(self) -> admin.GetHistoryResponse:
        return self._history.told(self._now_s())

    async def follow(self) -> None:
        while True:
            self._history.add(self._look().overview, self._now_s())
            await asyncio.sleep(INTERVAL_S)

    def _recent_look(self) -> _Look:
        now_s = self._now_s()
        if self._shared is None or now_s - self._shared[0] >= self._watch_interval_s / 2:
            self._shared = now_s, self._look()
        return self._shared[1]

    def _look(self) -> _Look:
        views = [_view(member) for member in self._membership.members()]
        rows, limits = worker_rows(views), self._config.router
        times = recent_times(self._traces.ended(None), self._traces.now_s())
        overview = admin.GetOverviewResponse(
            router=self._sources.router(),
            pools=pool_sums(sections(self._config.pools), rows, self._sources.pools()),
            ttft=times_overview(times.ttft_s, self._config.objectives.ttft_s),
            tpot=times_overview(times.tpot_s, self._config.objectives.tpot_s),
            imitates=next((each for each in (view.registration.model.imitates for view in views) if each), ""),
            max_in_flight_requests=limits.max_in_flight_requests,
            max_queued_requests=limits.max_queued_requests,
        )
        alerts = alerts_of(Sight(overview, rows, views, self._sources.index()))
        overview.alerts.extend(alerts[:MOST_ALERTS])
        overview.unlisted_alerts = max(0, len(alerts) - MOST_ALERTS)
        return _Look(overview, rows)


def _view(member: Member) -> admin.WorkerView:
    """As the registry and this router know the worker."""
    return admin.WorkerView(
        registration=member.registration,
        load=member.registration.load,
        in_flight_requests=member.in_flight_requests,
        suspect=member.is_suspect,
        version_skew=member.version_skew,
    )
