"""The index and placement for Prometheus, read off on the router's loop whenever Prometheus asks.

Labels are workers, pools, tiers, policies and reasons: never a prefix, a request or a tenant. Alarms on these figures:
`cluster_configs/alerts/rachis-index.yaml`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.placement_counts import PlacementCounts
from control_plane.replicator import Replicator
from control_plane.worker_snapshot import Pool

logger = logging.getLogger(__name__)

# The router's loop has not come to it even then.
SCRAPE_TIMEOUT_S = 2.0

_Samples = Mapping[tuple[str, ...], float]


class PlacementCollector(Collector):
    """`collect` runs on the thread of a scrape, which waits for a bounded time.

    status: as `GetIndexStatus` tells it. untrue: as `IndexCheck.untrue`.
    """

    def __init__(
        self,
        status: Callable[[], admin.GetIndexStatusResponse],
        counts: PlacementCounts,
        replicator: Replicator,
        untrue: Callable[[], Mapping[str, int] | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._status = status
        self._counts = counts
        self._replicator = replicator
        self._untrue = untrue
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        asked = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            return asked.result(SCRAPE_TIMEOUT_S)
        except TimeoutError:
            asked.cancel()
            logger.warning("the router is busy: no metrics of the index in this scrape")
            return ()

    async def _read(self) -> list[Metric]:
        status = self._status()
        return [
            *index_metrics(status, self._untrue()),
            *placement_metrics(status, self._counts),
            *replication_metrics(self._replicator),
        ]


def index_metrics(status: admin.GetIndexStatusResponse, untrue: Mapping[str, int] | None) -> list[Metric]:
    """untrue: by worker, what the last check found; None: there was no check."""
    return [
        _gauge("rachis_index_entries", "Chunks of prefixes that the router remembers", status.entries),
        _gauge("rachis_index_capacity_entries", "Chunks that it has room for", status.capacity_entries),
        _gauge("rachis_index_bytes", "Memory of the table of chunks", status.bytes),
        _counter(
            "rachis_index_dropped_total", "Chunks forgotten because hotter ones needed their places", status.dropped
        ),
        _gauge("rachis_index_connected", "1 while Redis answers", status.connected),
        _gauge("rachis_index_staleness_seconds", "Time since all workers' streams were last read", status.staleness_s),
        _gauge(
            "rachis_index_stale", "1 while the index is too old to be believed: placement uses load alone", status.stale
        ),
        _by_worker(
            "rachis_index_lag_batches",
            "Batches that a worker has told of and that are not in the index yet",
            {worker.worker_id: worker.lag_batches for worker in status.workers},
        ),
        _by_worker(
            "rachis_index_in_sync",
            "1 for a worker of which all that it is known to have told is in the index",
            {worker.worker_id: worker.in_sync for worker in status.workers},
        ),
        _by_worker(
            "rachis_index_silent",
            "1 for a worker that finishes requests and tells of no block",
            {worker.worker_id: worker.silent for worker in status.workers},
        ),
        _counter("rachis_index_batches_total", "Batches of claims taken in", status.batches),
        _counter("rachis_index_keys_total", "Chunks that these told of", status.keys),
        _counter("rachis_index_duplicates_total", "Batches that had been heard already, left out", status.duplicates),
        _counter("rachis_index_gaps_total", "Times that batches were missing", status.gaps),
        _counter("rachis_index_resyncs_total", "Snapshots taken in", status.resyncs),
        _counter("rachis_index_damaged_total", "Batches and snapshots that could not be read", status.damaged),
        _by_worker(
            "rachis_index_untrue_claims",
            "Chunks that the last `rachis index check` found in the index and not in a worker's pools",
            untrue or {},
        ),
    ]


def placement_metrics(status: admin.GetIndexStatusResponse, counts: PlacementCounts) -> list[Metric]:
    hits: dict[tuple[str, ...], float] = {}
    for tier, by_pool in (("device", counts.device_hit_tokens), ("host", counts.host_hit_tokens)):
        hits |= {(_pool_name(pool), tier): tokens for pool, tokens in by_pool.items()}
    return [
        _counters(
            "rachis_placement_decisions_total",
            "Attempts of requests that got a worker",
            ("pool", "policy"),
            {(_pool_name(pool), policy): count for (pool, policy), count in counts.decisions.items()},
        ),
        _counter(
            "rachis_placement_load_only_total",
            "Placements by load alone, because the index was stale",
            status.load_only_decisions,
        ),
        _counters(
            "rachis_placement_prompt_tokens_total",
            "Prompt tokens of placed requests",
            ("pool",),
            {(_pool_name(pool),): tokens for pool, tokens in counts.prompt_tokens.items()},
        ),
        _counters(
            "rachis_placement_hit_tokens_total",
            "What of them the chosen worker had, or was expected to have, as far as the router knew",
            ("pool", "tier"),
            hits,
        ),
        _counters(
            "rachis_disaggregation_decisions_total",
            "Requests by why they were, or were not, prefilled on a prefill worker",
            ("reason",),
            {(reason,): count for reason, count in status.disaggregation.items()},
        ),
    ]


def replication_metrics(replicator: Replicator) -> list[Metric]:
    held = sum(map(len, replicator.plan.copies.values()))
    return [
        _counter("rachis_replication_copies_total", "Hot prefixes copied to a further worker", replicator.copies),
        _counter("rachis_replication_failed_total", "Copies that came to nothing", replicator.failed),
        _counter("rachis_replication_given_up_total", "Prefixes that have cooled since", replicator.plan.given_up),
        _gauge("rachis_replication_copies", "Copies of prefixes that have not cooled", held),
    ]


def _pool_name(pool: Pool) -> str:
    return wire.Pool.Name(pool).removeprefix("POOL_").lower()


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=float(value))


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=float(value))


def _by_worker(name: str, documentation: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=["worker"])
    for worker, value in values.items():
        family.add_metric([worker], float(value))
    return family


def _counters(name: str, documentation: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family
