"""What became of the traces of a router, for Prometheus."""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.metrics.families import counter, counters
from control_plane.tracing.traces import Exporter


class TraceCollector(Collector):
    """Where a collector of traces is configured."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterable[Metric]:
        yield counter("rachis_traces_exported_total", "Traces that the collector has taken", self._exporter.exported)
        yield counters(
            "rachis_traces_dropped_total",
            "Traces that were to be exported, by why they were not: the queue was full, or they were not taken in time",
            ("reason",),
            {(reason,): float(count) for reason, count in self._exporter.dropped.items()},
        )
