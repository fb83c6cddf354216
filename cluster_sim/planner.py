"""The smallest prefill and decode pools that keep an objective, found by simulating few of them.

Attainment mostly grows with either pool, so sizes are found by bisection. But it need not: caches are divided among
more workers, and the placement of another pool is another. Therefore nothing is taken for granted of the answer: the
pools around it that cost less are simulated too, and when one keeps the objective, the search goes on from there. What
lies farther away is not looked at.

    first     one worker of each pool. Its engine seconds over the time in which requests arrive are about what any
              pools have to work at least: batches are never larger. With more workers more is cached: no strict bound
    grow      the pools that fail double until the objective is kept, or all GPUs are used in some division
    shrink    each pool by bisection, the other as it is
    verify    divisions of one GPU less, again from each that keeps the objective
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cluster_core.errors import InvalidInputError
from cluster_sim.reports.figures import Figures, Histogram

Pools = tuple[int, int]
Simulate = Callable[[int, int], Figures]

# Around an answer, by so many prefill workers more or less is looked.
_AROUND = 3


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """attainment: share of requests that have to be within the objectives of the figures. prefill_gpus, decode_gpus:
    of one worker. most_runs: simulations, at most."""

    attainment: float = 0.9
    most_gpus: int = 64
    prefill_gpus: int = 1
    decode_gpus: int = 1
    most_runs: int = 60

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise InvalidInputError(f"must be above 0 and at most 1, got {self.attainment}", field="attainment")
        least = self.prefill_gpus + self.decode_gpus
        if self.most_gpus < least:
            raise InvalidInputError(f"must be at least {least}, a worker of each pool", field="most_gpus")
        if self.most_runs < 3:
            raise InvalidInputError(f"must be at least 3, got {self.most_runs}", field="most_runs")

    def gpus(self, pools: Pools) -> int:
        return pools[0] * self.prefill_gpus + pools[1] * self.decode_gpus


@dataclass(frozen=True, slots=True)
class Trial:
    """What one simulation said. prefill: 0 for an aggregated pool. attainment: share of requests that are within all
    objectives; ttft_share, tpot_share: within that one, or without it, to about 1%."""

    prefill: int
    decode: int
    gpus: int
    attainment: float
    ttft_share: float
    tpot_share: float
    ttft_p90_ms: float
    tpot_p90_ms: float
    goodput_per_s: float
    dollars_per_million_tokens: float

    @property
    def workers(self) -> str:
        """Prefill + decode; one number for an aggregated pool."""
        return f"{self.prefill} + {self.decode}" if self.prefill else str(self.decode)


@dataclass(frozen=True, slots=True)
class Plan:
    """one_prefill_less, one_decode_less: None where no worker would be left. aggregated: as many GPUs without division;
    None where they do not make up a worker. least: workers that the work alone takes. verified: the pools around the
    answer were all simulated; False where `most_runs` ended the search before. runs: simulations."""

    best: Trial
    one_prefill_less: Trial | None
    one_decode_less: Trial | None
    aggregated: Trial | None
    least: Pools
    verified: bool
    runs: int
    tried: tuple[Trial, ...]


def plan(simulate: Simulate, settings: PlanSettings, done: Callable[[Trial], None] = lambda trial: None) -> Plan:
    """simulate: (prefill workers, decode workers), 0 prefill workers for an aggregated pool. done: gets each trial.
    Raises InvalidInputError where nothing keeps the objective, with the best that was found."""
    return _Search(simulate, settings, done).plan()


class _OutOfRunsError(Exception):
    """`most_runs` are used up."""


class _Search:
    def __init__(self, simulate: Simulate, settings: PlanSettings, done: Callable[[Trial], None]) -> None:
        self._simulate = simulate
        self._settings = settings
        self._done = done
        self._trials: dict[Pools, Trial] = {}
        # Three are kept for the comparison with the answer.
        self._runs_left = settings.most_runs - 3
        self._least: Pools = (1, 1)

    def plan(self) -> Plan:
        verified = True
        try:
            self._descend(self._shrunk(self._grown(self._first())))
        except _OutOfRunsError:
            verified = False
        kept = [trial for trial in self._trials.values() if self._keeps(trial)]
        if not kept:
            raise self._nothing_keeps_it(verified)
        best = min(kept, key=lambda trial: (trial.gpus, -trial.attainment, trial.prefill))
        self._runs_left += 3
        prefill, decode = best.prefill, best.decode
        settings = self._settings
        together = best.gpus // settings.decode_gpus
        return Plan(
            best,
            self._trial((prefill - 1, decode)) if prefill > 1 else None,
            self._trial((prefill, decode - 1)) if decode > 1 else None,
            self._trial((0, together)) if together else None,
            self._least,
            verified,
            len(self._trials),
            tuple(self._trials.values()),
        )

    def _trial(self, pools: Pools) -> Trial:
        known = self._trials.get(pools)
        if known is not None:
            return known
        if not self._runs_left:
            raise _OutOfRunsError
        self._runs_left -= 1
        return self._taken(pools, self._simulate(*pools))

    def _taken(self, pools: Pools, figures: Figures) -> Trial:
        trial = _trial_of(pools, self._settings.gpus(pools), figures)
        self._trials[pools] = trial
        self._done(trial)
        return trial

    def _keeps(self, trial: Trial) -> bool:
        return trial.prefill > 0 and trial.attainment >= self._settings.attainment

    def _fits(self, pools: Pools) -> bool:
        return min(pools) >= 1 and self._settings.gpus(pools) <= self._settings.most_gpus

    # The steps of the search.

    def _first(self) -> Pools:
        self._runs_left -= 1
        figures = self._simulate(1, 1)
        trial = self._taken((1, 1), figures)
        if self._keeps(trial):
            return 1, 1
        span_s = _arrivals_s(figures)
        busy_s = figures.busy_s
        wanted = self._settings.attainment
        prefill, decode = (
            max(1, math.ceil(wanted * busy_s.get(pool, 0.0) / span_s)) if span_s else 1
            for pool in ("prefill", "decode")
        )
        self._least = prefill, decode
        return self._least

    def _grown(self, pools: Pools) -> Pools:
        """That keep the objective. Raises InvalidInputError where none do."""
        while self._fits(pools):
            trial = self._trial(pools)
            if self._keeps(trial):
                return pools
            wanted = self._settings.attainment
            fails = trial.ttft_share < wanted, trial.tpot_share < wanted
            # Where each is kept alone, more of both is the way to keep them together.
            factors = [2 if each or not any(fails) else 1 for each in fails]
            pools = pools[0] * factors[0], pools[1] * factors[1]
        return self._divided()

    def _divided(self) -> Pools:
        """All GPUs: more of them for the pool whose objective is farther off, until none is left to move."""
        settings = self._settings
        low, high = 1, (settings.most_gpus - settings.decode_gpus) // settings.prefill_gpus
        while low <= high:
            prefill = (low + high) // 2
            pools = prefill, (settings.most_gpus - prefill * settings.prefill_gpus) // settings.decode_gpus
            trial = self._trial(pools)
            if self._keeps(trial):
                return pools
            if trial.ttft_share < trial.tpot_share:
                low = prefill + 1
            else:
                high = prefill - 1
        raise self._nothing_keeps_it(verified=True)

    def _shrunk(self, pools: Pools) -> Pools:
        prefill, decode = pools
        prefill = self._bisected(self._least[0], prefill, lambda number: (number, decode))
        decode = self._bisected(self._least[1], decode, lambda number: (prefill, number))
        return prefill, decode

    def _bisected(self, low: int, high: int, pools: Callable[[int], Pools]) -> int:
        """high: keeps the objective; so does what is returned."""
        while low < high:
            middle = (low + high) // 2
            if self._keeps(self._trial(pools(middle))):
                high = middle
            else:
                low = middle + 1
        return high

    def _descend(self, pools: Pools) -> None:
        """Until nothing around that costs less keeps the objective."""
        better: Pools | None = pools
        while better is not None:
            pools = better
            better = next((each for each in self._cheaper(pools) if self._keeps(self._trial(each))), None)

    def _cheaper(self, pools: Pools) -> Iterator[Pools]:
        """The largest pools of less cost, with about as many prefill workers, nearest first."""
        settings, prefill = self._settings, pools[0]
        gpus = settings.gpus(pools) - 1
        for number in sorted(range(prefill - _AROUND, prefill + _AROUND + 1), key=lambda each: abs(each - prefill)):
            decode = (gpus - number * settings.prefill_gpus) // settings.decode_gpus
            if number >= 1 and decode >= 1:
                yield number, decode

    def _nothing_keeps_it(self, verified: bool) -> InvalidInputError:
        settings = self._settings
        best = max(self._trials.values(), key=lambda trial: (trial.attainment, -trial.gpus))
        failing = [
            f"{name} is within its objective for {share:.1%} (P90 {p90_ms:.4g} ms)"
            for name, share, p90_ms in (
                ("TTFT", best.ttft_share, best.ttft_p90_ms), ("TPOT", best.tpot_share, best.tpot_p90_ms),
            ) if share < settings.attainment
        ]  # fmt: skip
        text = (
            f"nothing found up to {settings.most_gpus} GPUs has {settings.attainment:.0%} of the requests within the "
            f"objectives; most had {best.prefill} prefill and {best.decode} decode workers, {best.attainment:.1%}: "
            f"{' and '.join(failing) or 'each objective alone is kept, both together are not'}"
        )
        if not verified:
            text += f"; the search ended after {settings.most_runs - 3} simulations"
        return InvalidInputError(text, field="most_gpus")


def _trial_of(pools: Pools, gpus: int, figures: Figures) -> Trial:
    unfinished = figures.requests - figures.finished

    def share(histogram: Histogram, objective_s: float) -> float:
        if not figures.requests:
            return 0.0
        above = _above(histogram, objective_s) if objective_s > 0 else 0
        return max(0.0, 1 - (above + unfinished) / figures.requests)

    return Trial(
        *pools,
        gpus,
        figures.attainment,
        share(figures.ttft_s, figures.slo_ttft_s),
        share(figures.tpot_s, figures.slo_tpot_s),
        figures.ttft_s.quantile(0.9) * 1000,
        figures.tpot_s.quantile(0.9) * 1000,
        figures.goodput_per_s,
        figures.dollars_per_million_tokens,
    )


def _above(histogram: Histogram, objective_s: float) -> int:
    at_most = 0
    for value, seen in histogram.cumulative():
        if value > objective_s:
            break
        at_most = seen
    return histogram.count - at_most


def _arrivals_s(figures: Figures) -> float:
    """From the start to the end of the last window in which one arrived."""
    windows = [at_s for at_s, rate in figures.arrivals.per_s() if rate > 0]
    return windows[-1] + figures.arrivals.window_s if windows else 0.0


def as_json(plan: Plan) -> dict[str, Any]:
    """For machines: rounded; the same trials give the same text."""

    def row(trial: Trial | None) -> dict[str, Any] | None:
        return {name: round(value, 4) for name, value in asdict(trial).items()} if trial is not None else None

    best = plan.best
    return {
        "prefill_workers": best.prefill,
        "decode_workers": best.decode,
        "gpus": best.gpus,
        "prefill_per_decode": round(best.prefill / best.decode, 4),
        "best": row(best),
        "one_prefill_less": row(plan.one_prefill_less),
        "one_decode_less": row(plan.one_decode_less),
        "aggregated": row(plan.aggregated),
        "least_prefill_workers": plan.least[0],
        "least_decode_workers": plan.least[1],
        "verified": plan.verified,
        "simulations": plan.runs,
        "tried": [row(trial) for trial in plan.tried],
    }


# P90 in ms, requests within the objectives a second, dollars per million generated tokens.
COLUMNS = ("", "workers", "GPUs", "within", "TTFT P90", "TPOT P90", "goodput", "$/M tokens")


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Rows of `COLUMNS`."""
    rows = (
        ("answer", plan.best),
        ("one prefill less", plan.one_prefill_less),
        ("one decode less", plan.one_decode_less),
        ("aggregated", plan.aggregated),
    )
    return [
        (
            name, trial.workers, str(trial.gpus), f"{trial.attainment:.1%}", f"{trial.ttft_p90_ms:,.0f}",
            f"{trial.tpot_p90_ms:,.1f}", f"{trial.goodput_per_s:.2f}", f"{trial.dollars_per_million_tokens:.3f}",
        )
        for name, trial in rows
        if trial is not None
    ]  # fmt: skip
