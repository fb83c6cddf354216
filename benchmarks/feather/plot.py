"""Batch size and throughput over time, a line for each policy, as a picture: how policies converge."""

from collections.abc import Mapping, Sequence
from pathlib import Path

# Told apart with any colour vision (Okabe and Ito, 2008), and by their strokes without colours.
_LINES = (
    ("#D55E00", ":"), ("#E69F00", "-."), ("#56B4E9", "--"), ("#000000", "-"), ("#009E73", "-"), ("#CC79A7", "--"),
)  # fmt: skip
_SMOOTHED = 4


def save_plot(
    series: Mapping[str, Mapping[str, Sequence[float]]], ceiling_tok_s: float, title: str, path: Path
) -> None:
    """series: `at_s`, `batch` and `throughput_tok_s` of each policy. The format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for (name, points), (colour, stroke) in zip(series.items(), _LINES, strict=False):
        style = {"color": colour, "linestyle": stroke, "linewidth": 1.6}
        upper.plot(points["at_s"], _smooth(points["batch"]), label=name, **style)
        lower.plot(points["at_s"], _smooth(points["throughput_tok_s"]), label=name, **style)
    lower.axhline(ceiling_tok_s, color="#999999", linewidth=1, label="one group")
    upper.set(ylabel="requests in a step", title=f"{title}: the first round, nothing learned before", ylim=(0, None))
    lower.set(xlabel="seconds since the first arrival", ylabel="decode tokens/s", ylim=(0, None))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    lower.legend(loc="lower right", ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over the last second."""
    windows = [values[max(0, end - _SMOOTHED) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
