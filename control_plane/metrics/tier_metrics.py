"""The tiers of cached prefixes for Prometheus; see `control_plane.metrics.worker_figures`."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.metrics.worker_figures import Figure, metrics_of

_FIGURES: tuple[Figure[wire.TierReport], ...] = (
    Figure(
        CounterMetricFamily,
        "rachis_tier_prompt_tokens_total",
        "Prompt tokens of requests that have begun",
        None,
        lambda report: report.prompt_tokens,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_hit_tokens_total",
        "Prompt tokens that were found in a tier and not computed",
        "tier",
        lambda report: {"device": report.device_hit_tokens, "host": report.host_hit_tokens},
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_copied_bytes_total",
        "KV bytes copied to host memory and back, promotions among it",
        "direction",
        lambda report: {"out": report.copied_out_bytes, "back": report.copied_back_bytes},
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_copy_seconds_total",
        "Time that copies in the background took",
        "direction",
        lambda report: {"out": report.copy_out_s, "back": report.copy_back_s},
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_refused_total",
        "Prefixes that were offered to host memory and of which no more was copied",
        "reason",
        lambda report: report.refused_offers,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_promotions_total",
        "Promoted blocks that were asked for before they left the device, and that were not",
        "outcome",
        lambda report: {"used": report.promoted_used_blocks, "wasted": report.promoted_wasted_blocks},
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_evicted_total",
        "Blocks that left a tier",
        "tier",
        lambda report: {"device": report.evicted_device_blocks, "host": report.evicted_host_blocks},
    ),
    Figure(
        CounterMetricFamily,
        "rachis_tier_evicted_for_others_total",
        "Blocks that left a tier, of tenants that claimed room in it while others did so as well",
        "tier",
        lambda report: {
            "device": report.evicted_device_for_others_blocks,
            "host": report.evicted_host_for_others_blocks,
        },
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_tier_blocks",
        "Cached blocks that lie in a tier",
        "tier",
        lambda report: {"device": report.device_blocks, "host": report.host_blocks},
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_tier_capacity_blocks",
        "Blocks that have room in a tier",
        "tier",
        lambda report: {"device": report.device_capacity_blocks, "host": report.host_capacity_blocks},
    ),
)


def tier_metrics(views: Iterable[admin.WorkerView]) -> list[Metric]:
    """Of all workers that have tiers."""
    return metrics_of(_FIGURES, {view.registration.worker_id: view.tiers for view in views if view.HasField("tiers")})
