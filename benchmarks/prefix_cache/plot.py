"""Hit ratio over device capacity, a line for each policy, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.prefix_cache.comparison import OPTIMUM
from benchmarks.token_sizes import short_tokens

# Told apart with any colour vision (Okabe and Ito, 2008), and by their markers without colours.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")
_MARKERS = "osv^D*Px"


def save_plot(device_tokens: Sequence[int], hit_ratios: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """hit_ratios: of each policy, at each of the capacities. The format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, (names, ratios) in enumerate(_lines(hit_ratios)):
        per_cent = [100 * ratio for ratio in ratios]
        if OPTIMUM in names:
            axes.plot(device_tokens, per_cent, "--", color="#444444", label=names)
        else:
            colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
            axes.plot(device_tokens, per_cent, marker=marker, color=colour, label=names, markersize=5, linewidth=1.3)
    axes.set(xlabel="device tokens", ylabel="hit ratio, % of prompt tokens", title=title, ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(device_tokens, [short_tokens(each) for each in device_tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(hit_ratios: Mapping[str, Sequence[float]]) -> list[tuple[str, tuple[float, ...]]]:
    """Policies with the same figures share a line; the best at the greatest capacity first, as the lines lie."""
    names: dict[tuple[float, ...], list[str]] = {}
    for name, ratios in hit_ratios.items():
        names.setdefault(tuple(ratios), []).append(name)
    joined = [(" = ".join(each), ratios) for ratios, each in names.items()]
    return sorted(joined, key=lambda line: line[1][-1], reverse=True)
