"""The workers' tiers for Prometheus, asked of the workers whenever Prometheus asks the router.

Nothing is counted here: a worker that is started again counts from 0, as Prometheus expects of counters. A worker that
has no tiers, or does not answer in time, has no samples in that scrape.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.worker_views import WorkerViews

logger = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 1.0
# The router's loop has not come to it even then.
SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Figure:
    """values: the samples of one worker, by the value of `label`."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    label: str
    values: Callable[[wire.TierReport], Mapping[str, float]]


_FIGURES = (
    _Figure(
        CounterMetricFamily,
        "rachis_tier_hit_tokens_total",
        "Prompt tokens that were found in a tier and not computed",
        "tier",
        lambda report: {"device": report.device_hit_tokens, "host": report.host_hit_tokens},
    ),
    _Figure(
        CounterMetricFamily,
        "rachis_tier_copied_bytes_total",
        "KV bytes copied to host memory and back, promotions among it",
        "direction",
        lambda report: {"out": report.copied_out_bytes, "back": report.copied_back_bytes},
    ),
    _Figure(
        CounterMetricFamily,
        "rachis_tier_copy_seconds_total",
        "Time that copies in the background took",
        "direction",
        lambda report: {"out": report.copy_out_s, "back": report.copy_back_s},
    ),
    _Figure(
        CounterMetricFamily,
        "rachis_tier_refused_total",
        "Prefixes that were offered to host memory and of which no more was copied",
        "reason",
        lambda report: report.refused_offers,
    ),
    _Figure(
        CounterMetricFamily,
        "rachis_tier_promotions_total",
        "Promoted blocks that were asked for before they left the device, and that were not",
        "outcome",
        lambda report: {"used": report.promoted_used_blocks, "wasted": report.promoted_wasted_blocks},
    ),
    _Figure(
        CounterMetricFamily,
        "rachis_tier_evicted_total",
        "Blocks that left a tier",
        "tier",
        lambda report: {"device": report.evicted_device_blocks, "host": report.evicted_host_blocks},
    ),
    _Figure(
        GaugeMetricFamily,
        "rachis_tier_blocks",
        "Cached blocks that lie in a tier",
        "tier",
        lambda report: {"device": report.device_blocks, "host": report.host_blocks},
    ),
    _Figure(
        GaugeMetricFamily,
        "rachis_tier_capacity_blocks",
        "Blocks that have room in a tier",
        "tier",
        lambda report: {"device": report.device_capacity_blocks, "host": report.host_capacity_blocks},
    ),
)


class TierCollector(Collector):
    """Asks on the router's loop; `collect` runs on the thread of a scrape, which waits for a bounded time."""

    def __init__(self, views: WorkerViews, loop: asyncio.AbstractEventLoop) -> None:
        self._views = views
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        asked = asyncio.run_coroutine_threadsafe(self._views.gather(WORKER_TIMEOUT_S), self._loop)
        try:
            return tier_metrics(asked.result(SCRAPE_TIMEOUT_S))
        except TimeoutError:
            asked.cancel()
            logger.warning("the router is busy: no metrics of tiers in this scrape")
            return ()


def tier_metrics(views: Iterable[admin.WorkerView]) -> list[Metric]:
    """Of all workers that have tiers."""
    reports = {view.registration.worker_id: view.tiers for view in views if view.HasField("tiers")}
    prompts = CounterMetricFamily(
        "rachis_tier_prompt_tokens_total", "Prompt tokens of requests that have begun", labels=["worker"]
    )
    for worker, report in reports.items():
        prompts.add_metric([worker], report.prompt_tokens)
    metrics: list[Metric] = [prompts]
    for figure in _FIGURES:
        family = figure.family(figure.name, figure.help, labels=["worker", figure.label])
        for worker, report in reports.items():
            for label, value in figure.values(report).items():
                family.add_metric([worker, label], value)
        metrics.append(family)
    return metrics
