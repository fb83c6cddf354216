"""How many consoles look at a router, for Prometheus."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.metrics.families import counter, gauge


class ConsoleCounts(Protocol):
    """As `control_plane.console.streams` counts them."""

    open: int
    slow: int
    refused: int


class ConsoleCollector(Collector):
    def __init__(self, counts: ConsoleCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self._counts
        yield gauge("rachis_console_streams", "Streams that consoles have open", counts.open)
        yield counter(
            "rachis_console_slow_readers_total", "Streams that ended because their console did not read", counts.slow
        )
        yield counter(
            "rachis_console_refused_streams_total",
            "Streams that did not begin because too many were open",
            counts.refused,
        )
