"""What one router says of itself: how long it runs, what it works on, how requests ended, what it took itself."""

import importlib.metadata
from collections.abc import Callable

from rachis.v1 import admin_pb2 as admin

from cluster_core.clock import cpu_s, monotonic_s
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.intake.admission import Admission
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.placement.placer import Placer
from control_plane.server.router_service import RouterService


class RouterStatus:
    """Read off the router's parts whenever somebody asks; its uptime counts from here."""

    def __init__(
        self,
        service_id: str,
        follower: RegistryFollower,
        admission: Admission,
        router: RouterService,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        placer: Placer,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._service_id = service_id
        self._follower = follower
        self._admission = admission
        self._router = router
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._placer = placer
        self._now_s = now_s
        self._started_s = now_s()
        # Read off the installed files, which takes a while.
        self._version = importlib.metadata.version("rachis")

    async def asked(self) -> admin.GetRouterStatusResponse:
        """With how full Redis is, where it says so at once."""
        status, redis = self.to_wire(), await self._follower.redis_memory()
        if redis is not None:
            use = status.redis_memory
            use.what, use.limit = "redis", "maxmemory"
            use.used_bytes, use.limit_bytes = redis.used_bytes, redis.limit_bytes
        return status

    def to_wire(self) -> admin.GetRouterStatusResponse:
        overhead = sorted(self._dispatcher.overhead_ms)
        return admin.GetRouterStatusResponse(
            version=self._version,
            service_id=self._service_id,
            uptime_s=self._now_s() - self._started_s,
            in_flight_requests=self._admission.in_flight,
            queued_requests=self._admission.queued + self._router.waiting_for_first_worker,
            outcomes={state.value: count for state, count in self._router.outcomes.items()},
            registry_connected=self._follower.connected,
            overhead_p50_ms=_quantile(overhead, 0.5),
            overhead_p99_ms=_quantile(overhead, 0.99),
            cpu_s=cpu_s(),
            metrics_address=self._metrics.address,
            metrics_url=self._metrics.url,
            poisoned_requests=self._dispatcher.poison.poisoned(self._now_s()),
            open_sessions=self._router.open_sessions,
            memory=[
                admin.MemoryUse(what=use.what, used_bytes=use.used_bytes, limit_bytes=use.limit_bytes, limit=use.limit)
                for use in (*self._router.memory(), *self._placer.memory())
            ],
        )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
