"""A dashboard as the JSON that Grafana imports: schema 39, of Grafana 10.4 and later.

It names no data source, router or host: whoever opens it chooses these, and says once where the runbooks are served.
"""

import json
from collections.abc import Iterator
from typing import Any

from tools.dashboards.expressions import selected
from tools.dashboards.panel import Dashboard, Kind, Panel, Row
from tools.dashboards.table import alerts, histograms, metrics

COLUMNS = 24
HEIGHTS = {Kind.LINES: 8, Kind.NUMBER: 4, Kind.TABLE: 8}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RUNBOOK = "${runbooks}/%s.html"
_NOT_A_NUMBER = {"type": "special", "options": {"match": "nan", "result": {"text": "none yet"}}}


def dashboard_json(dashboard: Dashboard) -> str:
    written = {
        "uid": f"rachis-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["rachis"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {"type": "dashboards", "title": "Rachis", "tags": ["rachis"], "asDropdown": False, "keepTime": True}
            | {"includeVars": True}
        ],
        "templating": {"list": _variables()},
        "panels": list(_placed(dashboard.rows)),
    }
    return json.dumps(written, indent=1) + "\n"


def described(panel: Panel) -> str:
    """What its metrics mean, as it stands where they are defined."""
    known = metrics()
    names = panel.metrics(histograms())
    return "\n\n".join(f"`{name}`: {known[name].help}." for name in names) or panel.about


def runbooks(panel: Panel) -> list[str]:
    """Of the alerts that go by its metrics."""
    by_metric = alerts()
    names = panel.metrics(histograms())
    return list(dict.fromkeys(alert for name in names for alert in by_metric.get(name, ())))


def _variables() -> list[dict[str, Any]]:
    asked = {"type": "query", "datasource": _SOURCE, "refresh": 2, "sort": 1}
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        asked | {"name": "job", "label": "Service", "query": "label_values(rachis_build_info, job)"},
        asked
        | {"name": "instance", "label": "Routers", "query": 'label_values(rachis_build_info{job=~"$job"}, instance)'}
        | {"multi": True, "includeAll": True, "allValue": ".*"}
        | {"current": {"text": ["All"], "value": ["$__all"]}},
        {"name": "runbooks", "label": "Runbooks at", "type": "textbox", "query": "http://127.0.0.1:8001/runbooks"},
    ]


def _placed(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Each panel where the first room for it is, below its row's heading."""
    number, below = 0, 0
    for row in rows:
        number += 1
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": below}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        filled = [below + 1] * COLUMNS
        for panel in row.panels:
            number += 1
            x = min(range(COLUMNS - panel.width + 1), key=lambda at: max(filled[at : at + panel.width]))
            y = max(filled[x : x + panel.width])
            place = {"h": HEIGHTS[panel.kind], "w": panel.width, "x": x, "y": y}
            filled[x : x + panel.width] = [y + HEIGHTS[panel.kind]] * panel.width
            yield _panel(panel, number, place)
        below = max(filled)


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    linked = [{"title": name, "url": _RUNBOOK % name, "targetBlank": True} for name in runbooks(panel)]
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": described(panel),
        "datasource": _SOURCE,
        "gridPos": place,
        "links": linked,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "legendFormat": query.legend}
            | {"expr": selected(query.expression)}
            | _asked(panel.kind, query.expression)
            for at, query in enumerate(panel.queries)
        ],
        **_LOOKS[panel.kind](panel),
    }


def _asked(kind: Kind, expression: str) -> dict[str, Any]:
    """Lines are asked over time, everything else as it is now. Times to first token lead to traces."""
    if kind is Kind.LINES:
        return {"range": True, "instant": False, "exemplar": "_ttft_seconds_bucket" in expression}
    return {"range": False, "instant": True, "format": "table" if kind is Kind.TABLE else "time_series"}


def _lines(panel: Panel) -> dict[str, Any]:
    drawn = {"lineWidth": 1, "fillOpacity": 5, "showPoints": "never", "spanNulls": False}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawn}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _number(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
    if panel.red_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.red_from}]
    elif panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    defaults = {
        "unit": panel.unit,
        "noValue": "none",
        "mappings": [_NOT_A_NUMBER],
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "value_and_name",
        },
    }


def _table(panel: Panel) -> dict[str, Any]:
    """A row for each series; the time and the value say nothing."""
    link = {"title": "Runbook", "url": _RUNBOOK % "${__value.text}", "targetBlank": True}
    linked = {"matcher": {"id": "byName", "options": "alertname"}, "properties": [{"id": "links", "value": [link]}]}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit, "noValue": "none"}, "overrides": [linked]},
        "options": {"showHeader": True, "sortBy": [{"displayName": "severity", "desc": False}]},
        "transformations": [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}],
    }


_LOOKS = {Kind.LINES: _lines, Kind.NUMBER: _number, Kind.TABLE: _table}
