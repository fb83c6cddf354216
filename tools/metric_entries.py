"""Every metric, read off the code that defines them, which needs no service to run."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.kept_files import ROOT

ROUTER = tuple(sorted((ROOT / "control_plane" / "metrics").glob("*_metrics.py")))
GATEWAY = (ROOT / "control_plane" / "gateway" / "gateway_metrics.py",)

_UNITS = ("seconds", "bytes", "tokens", "blocks", "requests", "batches", "entries", "workers")
# What defines a metric, and which label it brings of itself.
_GAUGES = {"gauge": (), "gauges": (), "by_worker": ("worker",), "GaugeMetricFamily": ("worker",)}
_COUNTERS = {"counter": (), "counters": (), "CounterMetricFamily": ("worker",)}


@dataclass(frozen=True, slots=True)
class MetricEntry:
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in _UNITS else ""


def entries(sources: tuple[Path, ...]) -> list[MetricEntry]:
    """In the order of the sources."""
    return [entry for source in sources for entry in _entries(ast.parse(source.read_text()))]


def _entries(tree: ast.Module) -> Iterator[MetricEntry]:
    """Each call that gives a name that begins with `rachis_`, and after it what the metric says."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        given = [_text(argument) for argument in call.args]
        place = next((at for at, text in enumerate(given) if text.startswith("rachis_")), None)
        if place is None:
            continue
        maker = _name(call.args[0]) if place == 1 else _name(call.func)
        kind, own = _kind(maker, call)
        name = f"{given[place].removesuffix('_total')}_total" if kind == "counter" else given[place]
        yield MetricEntry(name, kind, (*own, *_labels(call, place + 2)), given[place + 1])


def _kind(maker: str, call: ast.Call) -> tuple[str, tuple[str, ...]]:
    if maker in _GAUGES:
        return "gauge", _GAUGES[maker]
    if maker in _COUNTERS:
        return "counter", _COUNTERS[maker]
    has_buckets = len(call.args) > 3 or any(keyword.arg == "buckets" for keyword in call.keywords)
    return ("histogram" if has_buckets else "counter"), ()


def _labels(call: ast.Call, place: int) -> tuple[str, ...]:
    """A name, or several; whatever else stands there is no label."""
    if place >= len(call.args):
        return ()
    argument = call.args[place]
    found = argument.elts if isinstance(argument, ast.Tuple) else [argument]
    return tuple(filter(None, map(_text, found)))


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
