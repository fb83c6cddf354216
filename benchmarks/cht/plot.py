"""What an operation of the chunked hash tree costs over the number of waiting requests, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

# Told apart with any colour vision (Okabe and Ito, 2008), and by their markers without colours.
_LINES = {
    "per_request_us": ("a request", "#000000", "o"),
    "insert_ns": ("insert", "#0072B2", "s"),
    "find_ns": ("find", "#E69F00", "^"),
    "add_ns": ("add", "#009E73", "v"),
    "finish_ns": ("finish", "#CC79A7", "D"),
}


def save_plot(rows: Sequence[Mapping[str, float]], title: str, path: Path) -> None:
    """rows: `waiting`, and the costs at so many. The format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    waiting = [row["waiting"] for row in rows]
    for name, (label, colour, marker) in _LINES.items():
        costs_us = [row[name] / (1e3 if name.endswith("_ns") else 1) for row in rows]
        axes.plot(waiting, costs_us, label=label, color=colour, marker=marker, markersize=5, linewidth=1.3)
    axes.set(xlabel="waiting requests", ylabel="us", title=title, xscale="log", ylim=(0, None))
    axes.set_xticks(waiting, [f"{each:,}" for each in waiting])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
