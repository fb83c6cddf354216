"""The router and the pools for Prometheus, read off on the router's loop whenever Prometheus asks.

Alerts on these figures: `cluster_configs/alerts/rachis-service.yaml`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.core import Metric
from rachis.v1 import admin_pb2 as admin

from cluster_configs.schema import RachisConfig
from cluster_core import event_log
from cluster_core.objectives import ObjectivesByClass
from control_plane.fleet.worker_probes import WorkerProbes
from control_plane.metrics.families import counter, counters, gauge, gauges, pool_label
from control_plane.metrics.loop_collector import SmallLoopCollector

# Why a call is refused at the door, as `Access.refused` has it.
_REASONS = ("wrong_key", "forbidden", "too_often", "overloaded")


class ServiceCollector(SmallLoopCollector):
    """status: what the router says of itself. pools: as `GetPools` tells them."""

    what = "the service"

    def __init__(
        self,
        config: RachisConfig,
        status: Callable[[], admin.GetRouterStatusResponse],
        probes: WorkerProbes,
        pools: Callable[[], Sequence[admin.PoolStatus]],
        refused: Callable[[], Mapping[str, int]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """refused: calls at the door, by why."""
        super().__init__(loop)
        self._config = config
        self._status = status
        self._probes = probes
        self._pools = pools
        self._refused = refused

    async def read(self) -> list[Metric]:
        return [*self._router_metrics(), *pool_metrics(self._pools())]

    def _router_metrics(self) -> list[Metric]:
        router, status = self._config.router, self._status()
        return [
            gauges("rachis_build_info", "1 for the version of the router", ("version",), {(status.version,): 1.0}),
            gauge(
                "rachis_router_in_flight_requests",
                "Slots that are taken, one for each choice of a request",
                status.in_flight_requests,
            ),
            gauge("rachis_router_max_in_flight_requests", "Slots that there are", router.max_in_flight_requests),
            gauge("rachis_router_queued_requests", "Requests that wait for a slot", status.queued_requests),
            gauge(
                "rachis_router_max_queued_requests",
                "Requests that may wait for a slot; above this they are refused",
                router.max_queued_requests,
            ),
            gauges(
                "rachis_router_memory_bytes",
                "Memory that grows with what clients send, by what it is for: estimates",
                ("what",),
                {(use.what,): use.used_bytes for use in status.memory},
            ),
            gauges(
                "rachis_router_memory_limit_bytes",
                "What of it there may be",
                ("what",),
                {(use.what,): use.limit_bytes for use in status.memory},
            ),
            gauge("rachis_router_tasks", "Tasks of the router's event loop", len(asyncio.all_tasks())),
            gauge("rachis_open_sessions", "Streaming sessions that are open", status.open_sessions),
            gauge(
                "rachis_poisoned_requests",
                "Requests, by what they ask for, that are refused because engines died while they worked on them",
                status.poisoned_requests,
            ),
            counters(
                "rachis_refused_calls_total",
                "Calls that were refused for who called: without a good key, without the role, or after many failures",
                ("reason",),
                {(reason,): self._refused().get(reason, 0) for reason in _REASONS},
            ),
            counter(
                "rachis_workers_found_hanging_total",
                "Times that a worker did not answer when it was asked whether it is alive, or its engine hung",
                self._probes.found_lost,
            ),
            counter(
                "rachis_calls_moved_total",
                "Calls that left a worker that hangs for another one",
                self._probes.left_calls,
            ),
            counter(
                "rachis_router_log_lines_lost_total",
                "Lines of the router's log that could not be written",
                event_log.lost_lines(),
            ),
            gauge("rachis_registry_connected", "1 while the registry in Redis answers", status.registry_connected),
            *objective_metrics(self._config.objectives.by_class),
        ]


def objective_metrics(objectives: ObjectivesByClass) -> list[Metric]:
    return [
        gauges(
            "rachis_objective_ttft_seconds",
            "Time to first token that 90% of all requests are meant to keep, by class",
            ("class",),
            {(str(whose),): each.ttft_s for whose, each in objectives.items()},
        ),
        gauges(
            "rachis_objective_tpot_seconds",
            "Time for each token after the first that 90% of all requests are meant to keep, by class; 0: none",
            ("class",),
            {(str(whose),): each.tpot_s for whose, each in objectives.items()},
        ),
    ]


def pool_metrics(pools: Sequence[admin.PoolStatus]) -> list[Metric]:
    names = [pool_label(status.pool) for status in pools]

    def of_each(values: Sequence[int]) -> dict[tuple[str, ...], float]:
        return {(name,): float(value) for name, value in zip(names, values, strict=True)}

    return [
        gauges(
            "rachis_pool_desired_workers",
            "Workers that a pool is meant to have",
            ("pool",),
            of_each([status.desired_workers for status in pools]),
        ),
        gauges(
            "rachis_pool_minimum_workers",
            "Workers below which a pool is short",
            ("pool",),
            of_each([status.minimum_workers for status in pools]),
        ),
        gauges(
            "rachis_pool_ready_workers",
            "Workers of a pool that are ready",
            ("pool",),
            of_each([status.ready_workers for status in pools]),
        ),
        counters(
            "rachis_workers_lost_total",
            "Workers whose process or node went away without being asked to",
            ("pool",),
            of_each([status.lost_workers for status in pools]),
        ),
    ]
