"""Families of Prometheus samples from values that are known already."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from rachis.v1 import worker_pb2 as wire

from control_plane.model.worker_snapshot import Pool

Samples = Mapping[tuple[str, ...], float]


def gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=float(value))


def counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=float(value))


def gauges(name: str, documentation: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """samples: by the values of the labels."""
    return _filled(GaugeMetricFamily(name, documentation, labels=labels), samples)


def counters(name: str, documentation: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """samples: by the values of the labels."""
    return _filled(CounterMetricFamily(name, documentation, labels=labels), samples)


def by_worker(name: str, documentation: str, values: Mapping[str, float]) -> Metric:
    return gauges(name, documentation, ("worker",), {(worker,): value for worker, value in values.items()})


def pool_label(pool: Pool) -> str:
    return wire.Pool.Name(pool).removeprefix("POOL_").lower()


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples.items():
        family.add_metric(labels, float(value))
    return family
