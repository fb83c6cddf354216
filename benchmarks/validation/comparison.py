"""What is simulated beside what is measured, figure by figure; pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster_sim.reports.figures import Histogram

COLUMNS = ("workload", "load", "figure", "measured", "simulated", "ratio", "within")
_SHARES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of both sides. simulated_range: the lowest and the highest of the simulated runs."""

    workload: str
    load: str
    figure: str
    measured: float
    simulated: float
    simulated_range: tuple[float, float]
    # Within which a prediction counts as right.
    tolerance: float

    @property
    def ratio(self) -> float:
        """1 where both are 0, infinite where only the measured one is."""
        if self.measured:
            return self.simulated / self.measured
        return math.inf if self.simulated else 1.0

    @property
    def within(self) -> bool:
        return abs(self.ratio - 1) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "load": self.load,
            "figure": self.figure,
            "measured": round(self.measured, 4),
            "simulated": round(self.simulated, 4),
            "simulated_range": [round(each, 4) for each in self.simulated_range],
            "ratio": round(self.ratio, 3) if math.isfinite(self.ratio) else None,
            "within": self.within,
        }


def compared(
    workload: str,
    load: str,
    measured: Sequence[Mapping[str, float]],
    simulated: Sequence[Mapping[str, float]],
    tolerance: float,
) -> list[Comparison]:
    """measured, simulated: the figures of each run, by name."""
    comparisons = []
    for figure in measured[0]:
        found = [run[figure] for run in simulated]
        middle = median(run[figure] for run in measured)
        comparisons.append(
            Comparison(workload, load, figure, middle, median(found), (min(found), max(found)), tolerance)
        )
    return comparisons


def tally(comparisons: Sequence[Comparison], tolerance: float) -> dict[str, Any]:
    """The comparisons, and how many of them are within a tolerance, under a name that says which."""
    return {
        "tolerance": tolerance,
        "figures": [each.as_json() for each in comparisons],
        f"within_{round(tolerance * 100)}_percent": sum(each.within for each in comparisons),
        "of": len(comparisons),
    }


def figures_of(
    ttft_s: Histogram, tpot_s: Histogram, tokens: int, duration_s: float, hit_ratio: float
) -> dict[str, float]:
    """Of one run of either side, so that both take their quantiles alike."""
    return {
        **{f"ttft_p{share}_ms": ttft_s.quantile(share / 100) * 1000 for share in _SHARES},
        **{f"tpot_p{share}_ms": tpot_s.quantile(share / 100) * 1000 for share in _SHARES},
        "throughput_tokens_per_s": tokens / duration_s,
        "hit_ratio": hit_ratio,
    }
