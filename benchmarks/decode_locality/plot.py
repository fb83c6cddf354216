"""Decode step time over what a batch shares, as a picture and as rows for a terminal. See `measure`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Told apart with any colour vision (Okabe and Ito, 2008).
_COLOURS = ("#999999", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#0072B2", "#000000")

Result = Mapping[str, Any]


def plain_points(result: Result) -> list[Mapping[str, Any]]:
    """Those of the longest prefix and the shortest suffix, without trees: what is shown."""
    plain = [point for point in result["points"] if len(point["levels"]) == 1]
    longest = max(point["shared_tokens"] for point in plain)
    shortest = min(point["suffix_tokens"] for point in plain)
    return [point for point in plain if point["shared_tokens"] == longest and point["suffix_tokens"] == shortest]


def table_of(result: Result) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: milliseconds by batch (down) and groups; where order counts, interleaved / grouped."""
    points = plain_points(result)
    times = {(point["batch"], point["groups"], point["order"]): f"{point['step_ms']:.2f}" for point in points}
    batches = sorted({point["batch"] for point in points})
    groups = sorted({point["groups"] for point in points} - set(batches[1:]) | _fixed_groups(points))

    def cell(batch: int, number: int) -> str:
        both = [times[key] for order in ("interleaved", "grouped") if (key := (batch, number, order)) in times]
        return " / ".join(both) or "-"

    columns = ["batch", *(f"{number} group{'s' * (number > 1)}" for number in groups), "all differ"]
    return columns, [
        [str(batch), *(cell(batch, number) for number in groups), cell(batch, batch)] for batch in batches
    ]  # fmt: skip


def _fixed_groups(points: Sequence[Mapping[str, Any]]) -> set[int]:
    """Numbers of groups that more batches have than the one of that size."""
    return {point["groups"] for point in points if point["groups"] < point["batch"]}


def save_plot(result: Result, path: Path) -> None:
    """Left: step time over groups, a line for each batch. Right: over divergent requests, with what the linear model
    says, and a stranger as a cross. The format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    _plot_groups(left, plain_points(result))
    _plot_divergence(right, result)
    for axes in (left, right):
        axes.set(ylabel="decode step, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['engine']} on {result['device']}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_groups(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    for batch, colour in zip(sorted({point["batch"] for point in points}), _COLOURS, strict=False):
        # One group and all different are the ends of both orders.
        for order, stroke in (("interleaved", "-"), ("grouped", "--")):
            line = sorted(
                (point["groups"], point["step_ms"])
                for point in points
                if point["batch"] == batch and (point["order"] == order or point["groups"] in (1, batch))
            )
            label = f"batch {batch}" if order == "interleaved" else None
            axes.plot(*zip(*line, strict=True), stroke, marker="o", markersize=3.5, color=colour, label=label)
    shared, suffix = points[0]["shared_tokens"], points[0]["suffix_tokens"]
    title = f"prefixes of {shared} tokens + {suffix}\nrequests interleaved (line) or grouped (dashes) by prefix"
    axes.set(xlabel="groups of requests that share a prefix", title=title, xscale="log")
    axes.set_xticks(sorted({point["groups"] for point in points}), minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=8)


def _plot_divergence(axes: Any, result: Result) -> None:
    series = result["divergence"]
    fit = result["fit"]
    for shared, colour in zip(sorted({point["shared_tokens"] for point in series}), _COLOURS[1:], strict=False):
        own = [point for point in series if point["shared_tokens"] == shared]
        line = [(point["divergent"], point["step_ms"]) for point in own if not point["strangers"]]
        axes.plot(*zip(*line, strict=True), "-o", markersize=3.5, color=colour, label=f"{shared} tokens")
        modelled = [(point["divergent"], _linear_ms(fit, point)) for point in own if not point["strangers"]]
        axes.plot(*zip(*modelled, strict=True), ":", color=colour)
        for point in own:
            if point["strangers"]:
                axes.plot([0], [point["step_ms"]], "x", markersize=9, color="black")
    batch = series[0]["batch"] if series else 0
    title = (
        f"one batch of {batch}: measured, and by the linear model (dots)\nx: with a short stranger that shares nothing"
    )
    axes.set(xlabel="divergent requests among those that share a prefix", title=title)
    if series:
        axes.legend(fontsize=8)


def _linear_ms(fit: Mapping[str, float], point: Mapping[str, float]) -> float:
    tokens_ms = sum(fit[f"per_{kind}_token_ms"] * point[f"{kind}_tokens"] for kind in ("total", "distinct"))
    return fit["base_ms"] + fit["per_request_ms"] * point["batch"] + tokens_ms
