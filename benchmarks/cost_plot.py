"""The two costs of a preemption over the victim's tokens, as a picture and as text for a terminal."""

import math
from pathlib import Path

from cluster_configs.preemption_costs import CostModel
from prefill_worker.preemption import crossover_tokens

# Fits the table into 80 columns.
_BAR_WIDTH = 12


def crossover_text(model: CostModel) -> str:
    """Which victims are cheaper to swap, in words."""
    crossover = crossover_tokens(model)
    if crossover is None:
        some = any(map(model.swap_is_cheaper, model.recompute.samples))
        return "for some small victims only" if some else "never"
    return "always" if crossover == 1 else f"from {crossover} tokens on"


def table_rows(model: CostModel) -> list[tuple[str, ...]]:
    """(tokens, recompute, out, in, out + in, cheaper, bars on a logarithmic scale) for each measured size."""
    sizes = list(model.recompute.samples)
    costs_ms = [cost for size in sizes for cost in (model.recompute_ms(size), model.swap_ms(size)) if cost > 0]
    low, high = min(costs_ms, default=1.0), max(costs_ms, default=1.0)

    def bar(ms: float) -> str:
        share = math.log(max(ms, low) / low) / math.log(high / low) if high > low else 1.0
        return "█" * max(1, round(share * _BAR_WIDTH))

    rows = []
    for size in sizes:
        recompute_ms, swap_ms = model.recompute_ms(size), model.swap_ms(size)
        each_ms = (recompute_ms, model.swap_out.ms(size), model.swap_in.ms(size), swap_ms)
        cheaper = "swap" if model.swap_is_cheaper(size) else "recompute"
        rows.append((str(size), *(f"{ms:.3f}" for ms in each_ms), cheaper, f"{bar(recompute_ms)}\n{bar(swap_ms)}"))
    return rows


def save_plot(model: CostModel, path: Path) -> None:
    """A PNG: every measurement as a dot, the medians as lines, the crossover where there is one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, curve in (("recompute", model.recompute), ("swap out", model.swap_out), ("swap in", model.swap_in)):
        line = axes.plot(list(curve.points), list(curve.points.values()), label=name)[0]
        dots = [(size, ms) for size, every in curve.samples.items() for ms in every]
        axes.plot(*zip(*dots, strict=True), ".", color=line.get_color(), alpha=0.4)
    sizes = list(model.recompute.samples)
    axes.plot(sizes, [model.swap_ms(size) for size in sizes], "--", label="swap out + in")
    crossover = crossover_tokens(model)
    if crossover is not None and crossover >= sizes[0]:
        axes.axvline(crossover, color="grey", linestyle=":", label=f"crossover at {crossover} tokens")
    axes.set(xlabel="tokens of the victim", ylabel="milliseconds", title=f"swap is cheaper: {crossover_text(model)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
