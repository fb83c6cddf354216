"""The table of panels and the dashboards that are written from it; Prometheus itself reads their expressions in
tests/process/cluster_configs/test_dashboards.py."""

import json
import re
from itertools import combinations
from typing import Any

import pytest

from tests import ROOT
from tests.prometheus import alert_rules
from tools.dashboards.expressions import (
    labels_in,
    metrics_in,
    of_workers,
    per_second,
    selected,
    top_workers,
)
from tools.dashboards.grafana import COLUMNS, dashboard_json, described, runbooks
from tools.dashboards.panel import Kind, Panel, Query, defined
from tools.dashboards.table import DASHBOARDS, alerts, histograms, metrics, shown
from tools.reference.labels import LABELS

PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]
QUERIES = [query for panel in PANELS for query in panel.queries]
# What Prometheus adds to a series, and what a fired alert has.
ADDED = {"job", "instance"}
OF_ALERTS = {"alertname", "alertstate", "severity", "instance", "pool", "worker", "node"}
# The units that a metric's name may end with, by Grafana's unit of the panel. Others count without a unit, or divide.
UNITS = {
    "s": {"seconds"},
    "bytes": {"bytes"},
    "binBps": {"bytes"},
    "reqps": {"requests", ""},
    "suffix: tokens": {"tokens"},
    "suffix: tokens/s": {"tokens"},
    "suffix: batches": {"batches"},
    # What these count is a block, as their labels say of what.
    "suffix: blocks/s": {""},
}
COUNTS = {"none", "cps", "percentunit"}
DIVISORS = {"rachis_decode_steps_total", "rachis_decode_decisions_total", "rachis_decode_admissions_total"}
NAMED = [panel.title for panel in PANELS]


def written(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "cluster_configs" / "dashboards" / f"rachis-{name}.json").read_text())
    return found


def unknown(panel: Panel) -> set[str]:
    """Metrics and labels that a panel names and that do not exist."""
    missing = set()
    for query in panel.queries:
        names = {defined(name, histograms()) for name in metrics_in(query.expression)}
        missing |= names - set(metrics())
        labels = {label for name in names & set(metrics()) for label in metrics()[name].labels} | ADDED
        labels |= OF_ALERTS if "ALERTS{" in query.expression else set()
        labels |= {"le"} if "_bucket" in query.expression else set()
        missing |= labels_in(query.expression) - labels
    return missing


def unnamed(query: Query) -> set[str]:
    """Labels of a legend that the expression does not keep."""
    return set(re.findall(r"{{(\w+)}}", query.legend)) - labels_in(query.expression)


def test_every_metric_has_a_panel_and_every_panel_shows_metrics_that_exist() -> None:
    assert set(shown()) == set(metrics())
    assert len(metrics()) > 100


@pytest.mark.parametrize("panel", PANELS, ids=NAMED)
def test_a_panel_names_only_metrics_and_labels_that_exist(panel: Panel) -> None:
    assert unknown(panel) == set()
    assert [unnamed(query) for query in panel.queries] == [set()] * len(panel.queries)


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        (per_second("rachis_requests_totals", "outcome"), {"rachis_requests_totals", "outcome"}),
        (per_second("rachis_requests_total", "outcomes"), {"outcomes"}),
        (per_second('rachis_requests_total{how="failed"}'), {"how"}),
        ("sum by (le) (rachis_requests_total)", {"le"}),
    ],
)
def test_a_name_that_does_not_exist_is_found(expression: str, missing: set[str]) -> None:
    assert unknown(Panel("planted", "none", (Query(expression, ""),))) == missing


def test_a_legend_of_a_label_that_was_added_up_is_found() -> None:
    assert unnamed(Query(of_workers("rachis_tier_blocks"), "{{tier}}")) == {"tier"}


def test_lines_by_worker_or_node_are_bounded() -> None:
    many = [query for query in QUERIES if {"{{worker}}", "{{node}}"} & set(re.findall(r"{{\w+}}", query.legend))]
    assert len(many) > 10
    assert [query for query in many if not re.match(r"(top|bottom)k\(10, ", query.expression)] == []


def test_figures_of_workers_are_made_one_before_they_are_added_up() -> None:
    """Two routers tell the same of a worker."""
    of_a_worker = {name for name, entry in metrics().items() if "worker" in entry.labels}
    for query in QUERIES:
        if of_a_worker & set(metrics_in(query.expression)) and "sum" in query.expression:
            assert "(max by (" in query.expression, query.expression


@pytest.mark.parametrize("panel", PANELS, ids=NAMED)
def test_the_unit_of_a_panel_is_that_of_its_metrics(panel: Panel) -> None:
    if panel.unit in COUNTS:
        return
    units = {metrics()[name].unit for name in set(panel.metrics(histograms())) - DIVISORS}
    assert units <= UNITS[panel.unit], panel.title


def test_a_counter_is_shown_by_its_growth_and_a_gauge_as_it_stands() -> None:
    for query in QUERIES:
        for name in metrics_in(query.expression):
            entry = metrics()[defined(name, histograms())]
            grows = re.search(rf"(?:rate|increase)\({name}\b", query.expression) is not None
            assert grows == (entry.kind != "gauge"), query.expression


def test_a_dashboard_chooses_the_routers_of_every_metric_of_theirs() -> None:
    assert selected('max by (worker) (rachis_tier_blocks{tier="host"})') == (
        'max by (worker) (rachis_tier_blocks{job=~"$job",instance=~"$instance",tier="host"})'
    )
    assert selected(per_second("rachis_migrations_total")) == (
        'sum (rate(rachis_migrations_total{job=~"$job",instance=~"$instance"}[$__rate_interval]))'
    )
    assert "$job" not in selected(per_second("rachis_gateway_sessions_total", "outcome"))
    assert selected("count by (rachis, vllm) (up)") == "count by (rachis, vllm) (up)"
    assert selected(top_workers("rachis_worker_stalled_seconds > 0")).endswith('instance=~"$instance"} > 0))')


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_a_dashboard_is_up_to_date_and_names_no_data_source(dashboard: Any) -> None:
    text = dashboard_json(dashboard)
    assert json.loads(text) == written(dashboard.name)
    assert set(re.findall(r'"uid": "([^"]+)"', text)) == {f"rachis-{dashboard.name}", "${datasource}"}
    assert re.search(r"\blocalhost\b|svc-", text) is None


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_panels_lie_beside_each_other(dashboard: Any) -> None:
    panels = written(dashboard.name)["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= COLUMNS for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_titles_of_a_dashboard_are_told_apart() -> None:
    for dashboard in DASHBOARDS:
        titles = [panel.title for panel in dashboard.panels]
        assert len(titles) == len(set(titles))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_what_is_read_first_stands_at_the_top_and_is_a_number_or_what_fires(dashboard: Any) -> None:
    first = dashboard.rows[0].panels[0]
    assert first.kind in (Kind.NUMBER, Kind.TABLE)


def test_alerts_that_fire_stand_first_of_all_and_lead_to_their_runbooks() -> None:
    first = written("service")["panels"][1]
    assert first["targets"][0]["expr"].startswith("max by (severity, alertname,")
    (link,) = first["fieldConfig"]["overrides"][0]["properties"][0]["value"]
    assert link["url"] == "${runbooks}/${__value.text}.html"


@pytest.mark.parametrize("panel", PANELS, ids=NAMED)
def test_a_panel_says_what_its_metrics_mean_and_links_the_runbooks_of_their_alerts(panel: Panel) -> None:
    for name in panel.metrics(histograms()):
        assert metrics()[name].help in described(panel)
        assert set(alerts().get(name, ())) <= set(runbooks(panel))
    assert described(panel)
    assert set(runbooks(panel)) <= set(alert_rules())


def test_every_alert_on_a_figure_is_linked_from_a_panel() -> None:
    """`up` is Prometheus' own: the alert that a router is down has no panel but the first."""
    assert {name for panel in PANELS for name in runbooks(panel)} == set(alert_rules())
    assert alerts()["rachis_worker_requests"] == ["RachisQueueGrowing"]
    assert alerts()["rachis_request_ttft_seconds"] == ["RachisTtftObjectiveMissed"]


def test_times_to_first_token_lead_to_traces_and_nothing_else_does() -> None:
    targets = [
        target for each in DASHBOARDS for panel in written(each.name)["panels"] for target in panel.get("targets", ())
    ]
    leading = [target["expr"] for target in targets if target.get("exemplar")]
    assert {name for expression in leading for name in metrics_in(expression)} == {
        "rachis_request_ttft_seconds_bucket",
        "rachis_session_ttft_seconds_bucket",
    }


def test_every_label_has_a_bound_and_every_bound_a_label() -> None:
    used = {label for entry in metrics().values() for label in entry.labels}
    assert used == {label.name for label in LABELS}
    assert len(LABELS) == len(used)
