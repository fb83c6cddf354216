"""What the table of panels is made of."""

from dataclasses import dataclass
from enum import StrEnum

from tools.dashboards.expressions import metrics_in

_PARTS = ("_bucket", "_sum", "_count")


class Kind(StrEnum):
    """Grafana's names."""

    LINES = "timeseries"
    NUMBER = "stat"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """legend: how a line is named; `{{label}}` is the label's value."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """unit: Grafana's. width: of the 24 columns that a row has."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    # A number is red from here on; None: it has no colour.
    red_from: float | None = None
    # A number is red as long as it is below.
    red_below: float | None = None
    # What it shows, where it shows none of the service's own metrics.
    about: str = ""

    def metrics(self, histograms: frozenset[str]) -> list[str]:
        """Those it shows, as they are defined: of a histogram the histogram. Each once, in their order."""
        names = (name for query in self.queries for name in metrics_in(query.expression))
        return list(dict.fromkeys(defined(name, histograms) for name in names))


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """name: of its file, without `rachis-`. about: what it is opened for."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def defined(name: str, histograms: frozenset[str]) -> str:
    """The metric that a name in an expression belongs to."""
    for part in _PARTS:
        if name.endswith(part) and name.removesuffix(part) in histograms:
            return name.removesuffix(part)
    return name
