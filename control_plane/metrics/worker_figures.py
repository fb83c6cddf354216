"""Figures for Prometheus that are read off what each worker reports, as literal tables.

Nothing is counted here: a worker that is started again counts from 0, as Prometheus expects of counters. A worker that
does not report has no samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class Figure(Generic[Report]):
    """values: the samples of one worker, by the value of `label`; without a label, the one sample."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    label: str | None
    values: Callable[[Report], Mapping[str, float] | float]


def metrics_of(figures: Sequence[Figure[Report]], reports: Mapping[str, Report]) -> list[Metric]:
    """A family for each figure; reports: by worker."""
    metrics: list[Metric] = []
    for figure in figures:
        labels = ["worker"] if figure.label is None else ["worker", figure.label]
        family = figure.family(figure.name, figure.help, labels=labels)
        for worker, report in reports.items():
            values = figure.values(report)
            if isinstance(values, Mapping):
                for label, value in values.items():
                    family.add_metric([worker, label], value)
            else:
                family.add_metric([worker], values)
        metrics.append(family)
    return metrics
