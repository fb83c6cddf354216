"""The index and placement for Prometheus, read off on the router's loop whenever Prometheus asks.

Labels are workers, pools, tiers, policies and reasons: never a prefix, a request or a tenant. Alerts on these figures:
`cluster_configs/alerts/rachis-index.yaml`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from rachis.v1 import admin_pb2 as admin

from cluster_core.objectives import RequestClass
from control_plane.metrics.families import by_worker, counter, counters, gauge, pool_label
from control_plane.metrics.loop_collector import SCRAPE_TIMEOUT_S, LoopCollector
from control_plane.placement.counts import PlacementCounts
from control_plane.placement.placer import Placer
from control_plane.placement.replicator import Replicator


@dataclass(frozen=True, slots=True)
class PlacementSeen:
    """status, untrue: of each worker. others: families of as many figures however many workers there are."""

    status: admin.GetIndexStatusResponse
    untrue: Mapping[str, int] | None
    others: list[Metric]


class PlacementCollector(LoopCollector[PlacementSeen]):
    """status: as `GetIndexStatus` tells it, another message each time. untrue: as `IndexCheck.untrue`, likewise."""

    what = "the index"

    def __init__(
        self,
        status: Callable[[], admin.GetIndexStatusResponse],
        placer: Placer,
        replicator: Replicator,
        untrue: Callable[[], Mapping[str, int] | None],
        loop: asyncio.AbstractEventLoop,
        timeout_s: float = SCRAPE_TIMEOUT_S,
    ) -> None:
        super().__init__(loop, timeout_s)
        self._status = status
        self._placer = placer
        self._replicator = replicator
        self._untrue = untrue

    async def read(self) -> PlacementSeen:
        status = self._status()
        others = [
            *placement_metrics(status, self._placer.counts),
            *objective_metrics(self._placer.counts, self._placer.prefill_heavy()),
            *replication_metrics(self._replicator),
        ]
        return PlacementSeen(status, self._untrue(), others)

    def metrics(self, seen: PlacementSeen) -> list[Metric]:
        return [*index_metrics(seen.status, seen.untrue), *seen.others]


def index_metrics(status: admin.GetIndexStatusResponse, untrue: Mapping[str, int] | None) -> list[Metric]:
    """untrue: by worker, what the last check found; None: there was no check."""
    return [
        gauge("rachis_index_entries", "Chunks of prefixes that the router remembers", status.entries),
        gauge("rachis_index_capacity_entries", "Chunks that it has room for", status.capacity_entries),
        gauge("rachis_index_bytes", "Memory of the table of chunks", status.bytes),
        counter(
            "rachis_index_dropped_total", "Chunks forgotten because hotter ones needed their places", status.dropped
        ),
        gauge("rachis_index_connected", "1 while Redis answers", status.connected),
        gauge("rachis_index_staleness_seconds", "Time since all workers' streams were last read", status.staleness_s),
        gauge(
            "rachis_index_stale", "1 while the index is too old to be believed: placement uses load alone", status.stale
        ),
        by_worker(
            "rachis_index_lag_batches",
            "Batches that a worker has told of and that are not in the index yet",
            {worker.worker_id: worker.lag_batches for worker in status.workers},
        ),
        by_worker(
            "rachis_index_in_sync",
            "1 for a worker of which all that it is known to have told is in the index",
            {worker.worker_id: worker.in_sync for worker in status.workers},
        ),
        by_worker(
            "rachis_index_silent",
            "1 for a worker that finishes requests and tells of no block",
            {worker.worker_id: worker.silent for worker in status.workers},
        ),
        counter("rachis_index_batches_total", "Batches of claims taken in", status.batches),
        counter("rachis_index_keys_total", "Chunks that these told of", status.keys),
        counter("rachis_index_duplicates_total", "Batches that had been heard already, left out", status.duplicates),
        counter("rachis_index_gaps_total", "Times that batches were missing", status.gaps),
        counter("rachis_index_resyncs_total", "Snapshots taken in", status.resyncs),
        counter("rachis_index_damaged_total", "Batches and snapshots that could not be read", status.damaged),
        by_worker(
            "rachis_index_untrue_claims",
            "Chunks that the last `rachis index check` found in the index and not in a worker's pools",
            untrue or {},
        ),
    ]


def placement_metrics(status: admin.GetIndexStatusResponse, counts: PlacementCounts) -> list[Metric]:
    hits: dict[tuple[str, ...], float] = {}
    for tier, by_pool in (("device", counts.device_hit_tokens), ("host", counts.host_hit_tokens)):
        hits |= {(pool_label(pool), tier): tokens for pool, tokens in by_pool.items()}
    return [
        counters(
            "rachis_placement_decisions_total",
            "Attempts of requests that got a worker",
            ("pool", "policy"),
            {(pool_label(pool), policy): count for (pool, policy), count in counts.decisions.items()},
        ),
        counter(
            "rachis_placement_load_only_total",
            "Placements by load alone, because the index was stale",
            status.load_only_decisions,
        ),
        counters(
            "rachis_placement_prompt_tokens_total",
            "Prompt tokens of placed requests",
            ("pool",),
            {(pool_label(pool),): tokens for pool, tokens in counts.prompt_tokens.items()},
        ),
        counters(
            "rachis_placement_hit_tokens_total",
            "What of them the chosen worker had, or was expected to have, as far as the router knew",
            ("pool", "tier"),
            hits,
        ),
        counters(
            "rachis_disaggregation_decisions_total",
            "Requests by why they were, or were not, prefilled on a prefill worker",
            ("reason",),
            {(reason,): count for reason, count in status.disaggregation.items()},
        ),
    ]


def objective_metrics(counts: PlacementCounts, prefill_heavy: int) -> list[Metric]:
    """Of placement by the objectives."""
    return [
        counters(
            "rachis_placement_ways_total",
            "Requests that placement by the objectives sent this way",
            ("way",),
            {(way.value,): count for way, count in counts.ways.items()},
        ),
        counters(
            "rachis_placement_refused_total",
            "Requests refused because no worker was expected to have the first token in time, or to keep TPOT",
            ("class",),
            {(asked.value,): counts.refused[asked] for asked in RequestClass},
        ),
        counter(
            "rachis_placement_bound_elsewhere_total",
            "Requests that are decoded by another worker than has prefilled them",
            counts.bound_elsewhere,
        ),
        gauge(
            "rachis_placement_prefill_heavy_workers",
            "Workers that do both and decode little now, for this router",
            prefill_heavy,
        ),
    ]


def replication_metrics(replicator: Replicator) -> list[Metric]:
    held = sum(map(len, replicator.plan.copies.values()))
    return [
        counter("rachis_replication_copies_total", "Hot prefixes copied to a further worker", replicator.copies),
        counter("rachis_replication_failed_total", "Copies that came to nothing", replicator.failed),
        counter("rachis_replication_given_up_total", "Prefixes that have cooled since", replicator.plan.given_up),
        gauge("rachis_replication_copies", "Copies of prefixes that have not cooled", held),
    ]
