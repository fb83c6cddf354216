"""Pictures of simulated runs, a line or bar for each variant: PNG, SVG or PDF files, and SVG for a page.

The same runs give the same bytes: no dates in the files, ids of SVG elements from a fixed salt.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster_sim.reports.figures import Figures, Histogram, Series

# Told apart with any colour vision (Okabe and Ito, 2008), and by their strokes without colours. The first is drawn in
# the colour of text.
_COLOURS = ("#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_STROKES = ("-", "--", "-.", ":")
_INK = "#010203"
_GREY = "#888888"
_NO_METADATA = {
    ".svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

# In time, of one line.
_MOST_WINDOWS = 64

Points = list[tuple[float, float]]
Draw = Callable[[Any, Sequence[Figures]], None]


def save(runs: Sequence[Figures], title: str, path: Path) -> None:
    """All panels in one picture. The format is that of the file's ending. Raises ValueError for an unknown one."""
    with _style() as pyplot:
        # Under a dark background nothing of a saved picture could be read otherwise.
        rows = math.ceil(len(PANELS) / 2)
        figure = pyplot.figure(figsize=(12, 4 * rows), layout="constrained", facecolor="white")
        for place, draw in enumerate(PANELS.values(), 1):
            draw(figure.add_subplot(rows, 2, place), runs)
        figure.suptitle(_plain(title))
        figure.savefig(path, dpi=100, metadata=_NO_METADATA.get(path.suffix.lower()))
        pyplot.close(figure)


def svg(runs: Sequence[Figures], panel: str) -> str:
    """One panel of `PANELS` as an `<svg>` element for a page: lines and text take the page's `color`, and no two
    panels share an id."""
    with _style(salt=panel) as pyplot:
        figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
        PANELS[panel](axes, runs)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA[".svg"])
        pyplot.close(figure)
    text = file.getvalue()
    used = set(re.findall(r"#([\w.-]+)[)\"]", text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text[text.index("<svg") :])
    return text.replace(_INK, "currentColor").rstrip()


def in_flight(figures: Figures) -> Points:
    """(seconds, requests that had arrived and had no outcome), at the end of each window of the coarser of the two."""
    window_s, (arrived, over) = _aligned(figures.arrivals, figures.completions)
    waiting = arrived.cumsum() - over.cumsum()
    return [((place + 1) * window_s, float(number)) for place, number in enumerate(waiting)]


def ratio(part: Series, whole: Series) -> Points:
    """(middle of the window, one over the other in it), where there is anything of `whole`."""
    window_s, (parts, wholes) = _aligned(part, whole)
    return [
        ((place + 0.5) * window_s, float(parts[place] / amount)) for place, amount in enumerate(wholes) if amount > 0
    ]


def rate(series: Series) -> Points:
    """(middle of the window, amount a second in it)."""
    window_s, (amounts,) = _aligned(series)
    return [((place + 0.5) * window_s, float(amount / window_s)) for place, amount in enumerate(amounts)]


def _aligned(*series: Series) -> tuple[float, list[NDArray[np.float64]]]:
    """Amounts in the same windows, few enough to be told apart in a picture. Windows only ever double, so those of one
    are a multiple of those of another."""
    window_s = max(each.window_s for each in series)
    end_s = max(len(each.per_s()) * each.window_s for each in series)
    while end_s > window_s * _MOST_WINDOWS:
        window_s *= 2
    windows = math.ceil(end_s / window_s)
    found = []
    for each in series:
        amounts = np.array([rate * each.window_s for _, rate in each.per_s()])
        many = round(window_s / each.window_s)
        found.append(np.pad(amounts, (0, windows * many - len(amounts))).reshape(windows, many).sum(axis=1))
    return window_s, found


# The panels.


def _ttft_ccdf(axes: Any, runs: Sequence[Figures]) -> None:
    _ccdf(axes, runs, "TTFT", lambda each: each.ttft_s, lambda each: each.slo_ttft_s)


def _tpot_ccdf(axes: Any, runs: Sequence[Figures]) -> None:
    _ccdf(axes, runs, "TPOT", lambda each: each.tpot_s, lambda each: each.slo_tpot_s)


def _ccdf(
    axes: Any,
    runs: Sequence[Figures],
    name: str,
    histogram: Callable[[Figures], Histogram],
    objective_s: Callable[[Figures], float],
) -> None:
    for place, run in enumerate(runs):
        # Nothing is above the greatest value, and a logarithm knows no zero.
        points = [(value * 1000, share) for value, share in histogram(run).ccdf() if value > 0 and share > 0]
        axes.plot(*_columns(points), **_line(place, run.name))
    for objective in sorted({objective_s(run) for run in runs if histogram(run).count} - {0.0}):
        axes.axvline(objective * 1000, color=_GREY, linewidth=1, zorder=0)
        axes.annotate(
            f"objective {objective * 1000:g} ms", (objective * 1000, 1), xycoords=("data", "axes fraction"),
            xytext=(3, -3), textcoords="offset points", va="top", rotation=90, color=_GREY, fontsize=8,
        )  # fmt: skip
    axes.set(title=f"{name} of requests", xlabel=f"{name}, ms", ylabel="share of requests above it")
    if any(len(line.get_xdata()) for line in axes.lines):
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            # Less than a decade has few ticks but these.
            axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    _finish(axes)


def _throughput(axes: Any, runs: Sequence[Figures]) -> None:
    _over_time(axes, runs, "Throughput", "output tokens a second", lambda run: rate(run.throughput))


def _requests(axes: Any, runs: Sequence[Figures]) -> None:
    # All variants get the same requests.
    axes.plot(*_columns(rate(runs[0].arrivals)), color=_GREY, linewidth=1, label="arrivals", zorder=0)
    _over_time(axes, runs, "Requests that are over", "requests a second", lambda run: rate(run.completions))


def _in_flight(axes: Any, runs: Sequence[Figures]) -> None:
    _over_time(axes, runs, "Requests in flight", "requests", in_flight)


def _batch(axes: Any, runs: Sequence[Figures]) -> None:
    _over_time(axes, runs, "Mean decode batch", "requests in a step", lambda run: ratio(run.throughput, run.steps))


def _hits(axes: Any, runs: Sequence[Figures]) -> None:
    _over_time(
        axes, runs, "Prompt tokens found cached", "share of prompt tokens", lambda run: ratio(run.hits, run.prompts)
    )


def _over_time(axes: Any, runs: Sequence[Figures], title: str, unit: str, points: Callable[[Figures], Points]) -> None:
    for place, run in enumerate(runs):
        axes.plot(*_columns(points(run)), **_line(place, run.name))
    axes.set(title=title, xlabel="seconds", ylabel=unit)
    axes.set_ylim(bottom=0)
    _finish(axes)


def _hit_ratio(axes: Any, runs: Sequence[Figures]) -> None:
    places = np.arange(len(runs))

    def shares(hits: Callable[[Figures], int]) -> NDArray[np.float64]:
        return np.array([hits(run) / run.prompt_tokens if run.prompt_tokens else 0.0 for run in runs])

    device, host = shares(lambda each: each.device_hit_tokens), shares(lambda each: each.host_hit_tokens)
    axes.barh(places, device, color=_COLOURS[1], label="on the device")
    axes.barh(places, host, left=device, color=_COLOURS[5], label="in host memory")
    for place, share in zip(places, device + host, strict=True):
        axes.text(share, place, f" {share:.1%}", va="center", fontsize=8)
    axes.set(title="Where prompt tokens were found", xlabel="share of prompt tokens", xlim=(0, 1.1))
    axes.set_yticks(places, [_plain(run.name) for run in runs])
    # From the top, with room for the legend below.
    axes.set_ylim(len(runs) + 0.2, -0.6)
    _finish(axes)


PANELS: dict[str, Draw] = {
    "ttft": _ttft_ccdf,
    "tpot": _tpot_ccdf,
    "throughput": _throughput,
    "requests": _requests,
    "in_flight": _in_flight,
    "batch": _batch,
    "hits": _hits,
    "hit_ratio": _hit_ratio,
}


def _line(place: int, name: str) -> dict[str, Any]:
    colours = (_INK, *_COLOURS)
    stroke = _STROKES[(place + place // len(colours)) % len(_STROKES)]
    return {"label": _plain(name), "color": colours[place % len(colours)], "linestyle": stroke, "linewidth": 1.6}


def _plain(text: str) -> str:
    """As it stands: dollar signs begin no formula, and a legend passes over no name."""
    return re.sub(r"^_", " _", " ".join(text.split())).replace("$", r"\$")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3, which="major")
    axes.legend(fontsize=8)


@contextmanager
def _style(salt: str = "rachis") -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "legend.framealpha": 0.0}):
        pyplot.rcParams.update(dict.fromkeys(inks, _INK))
        yield pyplot
