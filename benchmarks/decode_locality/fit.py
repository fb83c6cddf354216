"""What a decode step costs, as a sum of few terms that are never negative, and whether its attention is all or nothing.

    linear   step_ms = base + per_request * batch + per_total_token * total + per_distinct_token * distinct
    cache    the same + per_missed_token * missed: what a cache of capacity_tokens no longer holds when it is read again
             (least recently used first out). It knows the order of the batch; the capacity is fitted too

Squares of relative errors are what is made small. Verdict: FEATHER shows a cliff when one divergent request joins a
homogeneous batch, which has two possible causes, told apart here. Locality costs what has to be read once more. An
attention path that needs the whole batch to share (as vLLM's former cascade attention) is lost to a stranger as well,
who shares nothing and brings next to nothing to read: locality has no reason to charge for that one.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.decode_locality.batches import BatchShape, Grid, KvReads

# A loss below this share of the step is none, whatever the noise.
_NEGLIGIBLE_SHARE = 0.1
_CAPACITIES = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Decode steps of one shape."""

    # The best visit's median step, since other work on the machine only makes steps longer.
    step_ms: float
    # Timed steps.
    samples: int
    # How far the median of the visits lies above the best one, as a share of it.
    spread: float

    @classmethod
    def of_visits(cls, visits_ms: Sequence[Sequence[float]]) -> "Measured":
        medians = [float(np.median(visit)) for visit in visits_ms]
        best = min(medians)
        return cls(best, sum(map(len, visits_ms)), float(np.median(medians)) / best - 1)

    @property
    def noise_ms(self) -> float:
        return self.step_ms * self.spread


@dataclass(frozen=True, slots=True)
class StepModel:
    """A decode step as a sum of terms; errors are percentages of the measured time."""

    base_ms: float
    per_request_ms: float
    per_total_token_ms: float
    per_distinct_token_ms: float
    per_missed_token_ms: float
    _: KW_ONLY
    # Of the cache; None for the linear model, which misses nothing.
    capacity_tokens: int | None
    median_error_pct: float = 0.0
    p90_error_pct: float = 0.0
    max_error_pct: float = 0.0

    def step_ms(self, batch: int, reads: KvReads) -> float:
        return (
            self.base_ms
            + self.per_request_ms * batch
            + self.per_total_token_ms * reads.total_tokens
            + self.per_distinct_token_ms * reads.distinct_tokens
            + self.per_missed_token_ms * reads.missed(_tokens_held(self.capacity_tokens))
        )

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        figures = {name: value for name, value in asdict(self).items() if value is not None}
        if self.capacity_tokens is None:
            del figures["per_missed_token_ms"]
        return {name: value if name == "capacity_tokens" else _rounded(value) for name, value in figures.items()}


Sample = tuple[int, KvReads, float]


def fit_linear(samples: Sequence[Sample]) -> StepModel:
    """samples: (batch, what a step reads, its milliseconds), at least one."""
    return _fit(samples, None)


def fit_cache(samples: Sequence[Sample]) -> StepModel:
    """The capacity with the least error. Where missing costs nothing there is none to find: the linear model."""
    linear = _fit(samples, None)
    distances = sorted({distance for _, reads, _ in samples for distance in reads.by_reuse})
    if not distances:
        return linear
    tried = np.geomspace(max(1, distances[0] - 1), distances[-1], _CAPACITIES)
    fits = [_fit(samples, capacity) for capacity in sorted({int(each) for each in tried})]
    best = min(fits, key=lambda fit: _squares(fit, samples))
    return best if best.per_missed_token_ms > 0 else linear


def _fit(samples: Sequence[Sample], capacity_tokens: int | None) -> StepModel:
    held = _tokens_held(capacity_tokens)
    rows = [(1, batch, reads.total_tokens, reads.distinct_tokens, reads.missed(held)) for batch, reads, _ in samples]
    measured = np.array([step_ms for *_, step_ms in samples])
    factors = non_negative_least_squares(np.array(rows) / measured[:, None], np.ones(len(samples)))
    model = StepModel(*map(float, factors), capacity_tokens=capacity_tokens)
    errors = [abs(model.step_ms(batch, reads) / step_ms - 1) * 100 for batch, reads, step_ms in samples]
    return replace(
        model,
        median_error_pct=float(np.median(errors)),
        p90_error_pct=float(np.quantile(errors, 0.9)),
        max_error_pct=max(errors),
    )


def _tokens_held(capacity_tokens: int | None) -> float:
    return math.inf if capacity_tokens is None else capacity_tokens


def _squares(model: StepModel, samples: Sequence[Sample]) -> float:
    return sum((model.step_ms(batch, reads) / step_ms - 1) ** 2 for batch, reads, step_ms in samples)


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exact, by trying every set of columns: there are few."""
    width = matrix.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for columns in map(list, itertools.combinations(range(width), size)):
            factors = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            residual = float(np.sum((matrix[:, columns] @ factors - target) ** 2))
            if np.all(factors >= 0) and residual < least:
                best, least = np.zeros(width), residual
                best[columns] = factors
    return best


def verdict(
    grid: Grid, measured: Mapping[BatchShape, Measured], models: Mapping[str, StepModel], block_tokens: int
) -> dict[str, Any]:
    """The case of the longest prefix, and under "cases" that of each; all_or_nothing if it is in any of them.

    jump_ms: what the first divergent request adds; predicted_ms: by each model, and by what each further one added.
    stranger_ms: what a stranger instead of one that shares adds; predicted to be at most zero.
    """
    cases = [
        case
        for shared in sorted(grid.shared_tokens)
        if (case := _case(grid, shared, measured, models, block_tokens)) is not None
    ]
    if not cases:
        return {"all_or_nothing": None, "cases": []}
    return {**cases[-1], "all_or_nothing": any(case["all_or_nothing"] for case in cases), "cases": cases}


def _case(
    grid: Grid,
    shared: int,
    measured: Mapping[BatchShape, Measured],
    models: Mapping[str, StepModel],
    block_tokens: int,
) -> dict[str, Any] | None:
    """None where a part of the series could not be measured."""
    divergence, stranger = grid.divergence(shared), grid.stranger(shared)
    # Two alike, one divergent and one more: below that there is no series.
    if grid.series_batch < 3 or any(shape not in measured for shape in (*divergence, stranger)):
        return None
    alike, first, last = divergence[0], divergence[1], divergence[-1]
    jump_ms = measured[first].step_ms - measured[alike].step_ms
    later_ms = (measured[last].step_ms - measured[first].step_ms) / (last.divergent - first.divergent)
    before, after = alike.reads(block_tokens), first.reads(block_tokens)
    predicted = {
        name: model.step_ms(first.batch, after) - model.step_ms(alike.batch, before) for name, model in models.items()
    }
    predicted["later_divergent"] = later_ms
    stranger_ms = measured[stranger].step_ms - measured[alike].step_ms
    noise_ms = measured[stranger].noise_ms + measured[alike].noise_ms
    threshold_ms = max(noise_ms, _NEGLIGIBLE_SHARE * measured[alike].step_ms)
    return {
        "batch": alike.batch,
        "shared_tokens": shared,
        "homogeneous_ms": _rounded(measured[alike].step_ms),
        "jump_ms": _rounded(jump_ms),
        "predicted_ms": {name: _rounded(ms) for name, ms in predicted.items()},
        "ratio": {name: _rounded(jump_ms / ms) if ms > 0 else None for name, ms in predicted.items()},
        "stranger_ms": _rounded(stranger_ms),
        "noise_ms": _rounded(noise_ms),
        "threshold_ms": _rounded(threshold_ms),
        "all_or_nothing": stranger_ms > threshold_ms,
    }


def _rounded(value: float) -> float:
    """Six digits: more would be noise."""
    return float(f"{value:.6g}")
