"""Share of requests over TTFT, a line for each variant, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

# Told apart with any colour vision (Okabe and Ito, 2008), and by their strokes without colours.
_LINES = (("#D55E00", ":"), ("#56B4E9", "--"), ("#000000", "-"))


def save_plot(samples_ms: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """samples_ms: TTFT of each variant's requests, three variants at most. The format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for (name, samples), (colour, stroke) in zip(samples_ms.items(), _LINES, strict=False):
        axes.ecdf(samples, label=name, color=colour, linestyle=stroke, linewidth=1.6)
    axes.set(xlabel="TTFT, ms", ylabel="share of requests", title=title, ylim=(0, 1), xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
