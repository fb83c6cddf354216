"""The one table of panels: what a service tells Prometheus, and where an operator sees it.

A metric's name, kind, unit, labels and meaning stand where it is defined, the alerts on it in the rules. Both are read
off there, for the dashboards as for `docs/reference/metrics.md`, and are written nowhere again.
"""

import functools
import re
from collections.abc import Mapping, Sequence

import yaml

from tools.dashboards.cache_panels import CACHES
from tools.dashboards.panel import Dashboard, Panel, defined
from tools.dashboards.pool_panels import POOLS
from tools.dashboards.service_panels import SERVICE
from tools.dashboards.session_panels import SESSIONS
from tools.kept_files import ROOT
from tools.metric_entries import GATEWAY, ROUTER, MetricEntry, entries

# In the order in which they are looked at.
DASHBOARDS = (SERVICE, POOLS, CACHES, SESSIONS)
RULES = ROOT / "cluster_configs" / "alerts"


@functools.cache
def metrics() -> Mapping[str, MetricEntry]:
    """All of a service, by name."""
    return {entry.name: entry for entry in (*entries(ROUTER), *entries(GATEWAY))}


@functools.cache
def histograms() -> frozenset[str]:
    return frozenset(name for name, entry in metrics().items() if entry.kind == "histogram")


@functools.cache
def alerts() -> Mapping[str, Sequence[str]]:
    """Which alerts go by a metric, those that go by a recording of it included; of some metrics none."""
    groups = [group for file in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(file.read_text())["groups"]]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    by_metric: dict[str, list[str]] = {}
    for rule in rules:
        if "alert" not in rule:
            continue
        asked = rule["expr"] + "".join(expr for name, expr in recorded.items() if name in rule["expr"])
        names = (defined(name, histograms()) for name in re.findall(r"(?<!:)\brachis_\w+", asked))
        for name in dict.fromkeys(names):
            by_metric.setdefault(name, []).append(rule["alert"])
    return by_metric


def shown() -> Mapping[str, Sequence[tuple[Dashboard, Panel]]]:
    """The panels that show a metric."""
    by_metric: dict[str, list[tuple[Dashboard, Panel]]] = {}
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for name in panel.metrics(histograms()):
                by_metric.setdefault(name, []).append((dashboard, panel))
    return by_metric
