"""Share of requests over TTFT, a line for each placement policy, as a picture."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Told apart with any colour vision (Okabe and Ito, 2008), and by their strokes without colours.
_LINES = (
    ("#000000", "-"), ("#999999", ":"), ("#D55E00", "-."), ("#E69F00", "--"), ("#56B4E9", ":"), ("#0072B2", "--"),
)  # fmt: skip


def save_plot(ttft_ms: Mapping[str, NDArray[np.float64]], title: str, path: Path) -> None:
    """ttft_ms: of each policy's requests, six policies at most. The format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for (name, samples), (colour, stroke) in zip(ttft_ms.items(), _LINES, strict=False):
        axes.ecdf(samples, label=name, color=colour, linestyle=stroke, linewidth=1.6)
    axes.axhline(0.9, color="#BBBBBB", linewidth=0.8, zorder=0)
    axes.set(xlabel="TTFT, ms", ylabel="share of requests", title=title, ylim=(0, 1), xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="major")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
