"""What panels ask Prometheus, in few forms, and what such an expression names.

Every router asks all workers for their figures: with two routers each figure of a worker is there twice. So a worker's
figures are first made one by `max`, and only then added up. A router's own figures are added up as they are.
Expressions name no router: `selected` has each name take the routers that the reader of a dashboard has chosen.
"""

import re

# What a reader chooses at the top of a dashboard. Gateways are scraped by a job of their own.
_CHOSEN = 'job=~"$job",instance=~"$instance"'
_UNSELECTED = "rachis_gateway_"
# Of the many workers of a large service a panel shows these.
_MOST_WORKERS = 10

_NAME = re.compile(r"\b(rachis_\w+)(\{([^}]*)\})?")
_MATCHERS = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on|group_left|without) \(([^)]*)\)")


def per_second(metric: str, *by: str) -> str:
    """How fast a router's counter grows, added up over routers."""
    return f"sum{_by(by)} (rate({metric}[$__rate_interval]))"


def total(metric: str, *by: str) -> str:
    """A router's gauge, added up over routers."""
    return f"sum{_by(by)} ({metric})"


def largest(metric: str, *by: str) -> str:
    """For what routers tell alike, or what is worst at one of them."""
    return f"max{_by(by)} ({metric})"


def quantile(share: float, histogram: str, *by: str) -> str:
    """What this share of all that was observed kept."""
    return f"histogram_quantile({share}, sum{_by((*by, 'le'))} (rate({histogram}_bucket[$__rate_interval])))"


def of_workers(metric: str, *by: str) -> str:
    """A gauge of workers, added up over them."""
    return f"sum{_by(by)} ({_once(metric, by)})"


def workers_per_second(metric: str, *by: str) -> str:
    """How fast a counter of workers grows, added up over them."""
    return f"sum{_by(by)} ({_once(f'rate({metric}[$__rate_interval])', by)})"


def top_workers(metric: str) -> str:
    """A gauge of the workers where it is largest."""
    return f"topk({_MOST_WORKERS}, {_once(metric, ())})"


def top_workers_per_second(metric: str) -> str:
    """How fast a counter grows at the workers where it does so fastest."""
    return f"topk({_MOST_WORKERS}, {_once(f'rate({metric}[$__rate_interval])', ())})"


def ratio(part: str, whole: str) -> str:
    """Of two expressions with the same labels."""
    return f"{part} / {whole}"


def selected(expression: str) -> str:
    """The expression as a dashboard has it: of the chosen routers."""
    return _NAME.sub(_with_choice, expression)


def metrics_in(expression: str) -> list[str]:
    """Names as Prometheus has them, each once, in their order."""
    return list(dict.fromkeys(found[1] for found in _NAME.finditer(expression)))


def labels_in(expression: str) -> set[str]:
    """Labels that it matches or groups by."""
    matched = {part.split("=")[0].strip("!~ ") for body in _MATCHERS.findall(expression) for part in _parts(body)}
    grouped = {label.strip() for body in _GROUPING.findall(expression) for label in body.split(",")}
    return (matched | grouped) - {""}


def _once(expression: str, by: tuple[str, ...]) -> str:
    return f"max{_by(('worker', *by))} ({expression})"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _parts(matchers: str) -> list[str]:
    """Values may have commas in quotes."""
    return re.findall(r'\w+\s*[=!~]+\s*"[^"]*"', matchers)


def _with_choice(found: re.Match[str]) -> str:
    name, matchers = found[1], found[3]
    if name.startswith(_UNSELECTED):
        return found[0]
    return f"{name}{{{_CHOSEN}{',' if matchers else ''}{matchers or ''}}}"
