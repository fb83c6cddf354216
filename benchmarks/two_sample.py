"""Whether two samples may be of one distribution: the two-sample Kolmogorov-Smirnov test."""

import math
from collections.abc import Sequence

import numpy as np


def ks_test(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """(statistic, p-value). The p-value is asymptotic, with Stephens' correction (1970) for finite samples."""
    one, two = np.sort(first), np.sort(second)
    together = np.concatenate([one, two])
    below = [np.searchsorted(each, together, side="right") / len(each) for each in (one, two)]
    statistic = float(np.max(np.abs(below[0] - below[1])))
    effective = math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    scaled = (effective + 0.12 + 0.11 / effective) * statistic
    # Kolmogorov's distribution; the series converges slowly where it is 1.
    if scaled < 0.2:
        return statistic, 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return statistic, min(max(2 * sum(terms), 0.0), 1.0)
