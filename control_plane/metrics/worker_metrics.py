"""The workers' figures for Prometheus, asked of the workers whenever Prometheus asks the router.

A worker that does not answer in time has no samples in that scrape but those of its registration.
"""

import asyncio
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from rachis.v1 import admin_pb2 as admin

from control_plane.fleet.membership import may_work
from control_plane.fleet.worker_views import WorkerViews
from control_plane.metrics.decode_metrics import decode_metrics
from control_plane.metrics.families import by_worker, gauges, pool_label
from control_plane.metrics.loop_collector import SCRAPE_TIMEOUT_S, LoopCollector
from control_plane.metrics.tier_metrics import tier_metrics
from control_plane.metrics.worker_figures import Figure, metrics_of

WORKER_TIMEOUT_S = 1.0

_FIGURES: tuple[Figure[admin.WorkerView], ...] = (
    Figure(
        GaugeMetricFamily,
        "rachis_worker_requests",
        "Requests in the engine: those that run, those that wait",
        "state",
        lambda view: {"running": view.load.running_requests, "waiting": view.load.waiting_requests},
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_worker_leased_handoffs",
        "Finished prefills whose blocks are leased until they are pulled or released",
        None,
        lambda view: view.load.leased_handoffs,
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_worker_quarantined_blocks",
        "Blocks that a pull may still write into which was given up at its deadline: of use to nobody until it is over",
        None,
        lambda view: view.load.quarantined_blocks,
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_worker_resident_bytes",
        "Memory of the worker's process",
        None,
        lambda view: view.counters.resident_bytes,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_handoffs_expired_total",
        "Hand-offs whose deadline passed before the decode worker could pull their blocks",
        None,
        lambda view: view.counters.handoffs_expired,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_handoffs_mismatched_total",
        "Hand-offs whose blocks were computed from other tokens than they were to be pulled for, or arrived as others",
        None,
        lambda view: view.counters.handoffs_mismatched,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_handoffs_verified_total",
        "Hand-offs whose pulled blocks were compared with the sender's (handoff.verify_share)",
        None,
        lambda view: view.counters.handoffs_verified,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_worker_log_lines_lost_total",
        "Lines of the worker's log that could not be written",
        None,
        lambda view: view.counters.log_lines_lost,
    ),
)


class WorkerCollector(LoopCollector[Sequence[admin.WorkerView]]):
    what = "the workers"

    def __init__(
        self, views: WorkerViews, loop: asyncio.AbstractEventLoop, timeout_s: float = SCRAPE_TIMEOUT_S
    ) -> None:
        super().__init__(loop, timeout_s)
        self._views = views

    async def read(self) -> Sequence[admin.WorkerView]:
        return await self._views.gather(WORKER_TIMEOUT_S, admin.ListWorkersRequest())

    def metrics(self, seen: Sequence[admin.WorkerView]) -> list[Metric]:
        return [
            *worker_metrics(seen),
            *registration_metrics(seen),
            *node_metrics(seen),
            *tier_metrics(seen),
            *decode_metrics(seen),
        ]


def worker_metrics(views: Sequence[admin.WorkerView]) -> list[Metric]:
    """Of all workers that have answered."""
    return metrics_of(_FIGURES, {view.registration.worker_id: view for view in views if view.HasField("load")})


def registration_metrics(views: Sequence[admin.WorkerView]) -> list[Metric]:
    """Of all workers in the registry, whether they answer or not."""
    records = {view.registration.worker_id: view.registration for view in views}
    usable: dict[tuple[str, ...], float] = {
        (view.registration.worker_id, pool_label(view.registration.pool), view.registration.node): float(
            may_work(view.registration) and not view.suspect and not view.version_skew
        )
        for view in views
    }
    versions: dict[tuple[str, ...], float] = {
        (worker, record.versions.rachis, record.versions.vllm, record.versions.nixl): 1.0
        for worker, record in records.items()
    }
    return [
        gauges("rachis_worker_usable", "1 for a worker that may get requests", ("worker", "pool", "node"), usable),
        gauges(
            "rachis_worker_versions_info", "1 for a worker's versions", ("worker", "rachis", "vllm", "nixl"), versions
        ),
        by_worker(
            "rachis_worker_version_skew",
            "1 for a worker whose versions do not fit the router's: it gets no requests",
            {view.registration.worker_id: bool(view.version_skew) for view in views},
        ),
        by_worker(
            "rachis_worker_stalled_seconds",
            "How long the worker's engine has been hanging in a step, command or copy; 0 where it works",
            {worker: record.load.stalled_s for worker, record in records.items()},
        ),
        by_worker(
            "rachis_worker_clock_ahead_seconds",
            "How far the clock of the worker's host is ahead of Redis's",
            {worker: record.clock_ahead_ms / 1000 for worker, record in records.items()},
        ),
    ]


def node_metrics(views: Sequence[admin.WorkerView]) -> list[Metric]:
    """Of all nodes with a worker that tells; of several workers of one node the last one is taken."""
    told = {(view.registration.node,): view.counters for view in views if view.counters.node_memory_bytes}
    return [
        gauges(
            "rachis_node_memory_bytes",
            "Memory of a node that runs workers",
            ("node",),
            {node: counters.node_memory_bytes for node, counters in told.items()},
        ),
        gauges(
            "rachis_node_available_bytes",
            "What of it could be had without swapping",
            ("node",),
            {node: counters.node_available_bytes for node, counters in told.items()},
        ),
    ]
