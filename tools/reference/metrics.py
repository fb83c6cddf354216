"""`docs/reference/metrics.md`: every metric with its meaning, the alerts on it and the panel that shows it; labels."""

import math
from collections.abc import Iterable

from tools.dashboards.table import alerts, shown
from tools.metric_entries import GATEWAY, ROUTER, MetricEntry, entries
from tools.reference.labels import LABELS, OF_A_WORKER, Label
from tools.reference.table import WRITTEN, code, prose, table

_INTRODUCTION = """\
Where Prometheus reads them, and the rules for alerts: [putting them to use](../runbooks/README.md#putting-them-to-use).
Names follow Prometheus' conventions: a counter ends with `_total`, and a unit stands last before it. The
panels are those of the [dashboards](../dashboards.md).
"""
_GATEWAYS = """
Each gateway process serves these at its own `/metrics`, beside those of vLLM's front.
"""
_CARDINALITY = """
## Labels and their bounds

No label holds what a client sends: no request, session, prompt, tenant, model or adapter. What there can be of each is
bounded by the code or by the number of workers.

"""
# Buckets of the largest histogram, with the one without end, its sum and its count, and when it was begun.
HISTOGRAM_SERIES = 20


def page() -> str:
    parts = [
        "# Metrics\n",
        WRITTEN.format(source="[metrics](../../control_plane/metrics) and [dashboards](../../tools/dashboards)"),
        _INTRODUCTION,
        "## Of a router\n",
        _table(entries(ROUTER)),
        "## Of a gateway\n" + _GATEWAYS,
        _table(entries(GATEWAY)),
    ]
    return "\n".join(parts) + _CARDINALITY + _labels() + "\n" + _said()


def series(metrics: Iterable[MetricEntry], of: str = "") -> int:
    """The most series that metrics have; of: for each `worker` or `node`, "" for those of neither."""
    return sum(_series(metric) for metric in metrics if _counted_by(metric) == of)


def _table(metrics: list[MetricEntry]) -> str:
    panels, by_alert = shown(), alerts()
    rows = (
        (
            code(entry.name),
            entry.kind,
            entry.unit,
            ", ".join(map(code, entry.labels)),
            prose(entry.help),
            ", ".join(f"[{name}](../runbooks/{name}.md)" for name in by_alert.get(entry.name, ())),
            ", ".join(f"{dashboard.name}: {panel.title}" for dashboard, panel in panels[entry.name]),
        )
        for entry in metrics
    )
    return table(("metric", "kind", "unit", "labels", "what", "alerts", "panels"), rows)


def _labels() -> str:
    rows = ((code(label.name), prose(label.values), label.bound) for label in LABELS)
    return table(("label", "what it says", "at most"), rows)


def _said() -> str:
    router = entries(ROUTER)
    own, worker, node = series(router), series(router, "worker"), series(router, "node")
    return (
        f"So a router has at most {own:,} series of its own, {worker} for each worker, and {node} for each node; "
        f"a gateway has {series(entries(GATEWAY))}. For 100 workers on 25 nodes a router has "
        f"{own + 100 * worker + 25 * node:,} at most; what never happened has none.\n"
    )


def _series(metric: MetricEntry) -> int:
    """Of one worker or node, where it is of each."""
    by_name = {label.name: label for label in LABELS}
    own = set(metric.labels) - {"worker", "node"} - (OF_A_WORKER if "worker" in metric.labels else set())
    combinations = math.prod(_most(by_name[name]) for name in own)
    return combinations * (HISTOGRAM_SERIES if metric.kind == "histogram" else 1)


def _most(label: Label) -> int:
    assert label.most is not None, f"{label.name} is of each worker"
    return label.most


def _counted_by(metric: MetricEntry) -> str:
    return next((name for name in ("worker", "node") if name in metric.labels), "")
