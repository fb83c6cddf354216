"""Pools by the objective: what each set-up carries, over a grid of objectives: `rachis bench system --grid`.

Every set-up gets the same requests on the same GPUs, simulated by `cluster_sim` with light engines:
    pools_25 ...    separate pools, so many percent of the workers prefill; placement by hotness, conditional
    shared          workers that do both, by hotness with a term for the queue of prompts
    lmetric         the same workers, placed by LMetric (arXiv:2603.15202)
    deflection_50   the same workers, half of which prefill, by prefill deflection (arXiv:2607.02043): bounded chunks
    taichi_50       the same by TaiChi's length-aware prefill (arXiv:2508.01989); decodes do not flow: decision 0061
    hybrid          the same workers by the objectives: bounded chunks, decodes bound late, early refusal
In all of them a request whose KV has been pulled comes before prompts. The objectives are nothing to the first three:
one run of theirs tells all cells of a rate. The last three are run for each cell, around what the best other carries.

`capacity` is the rate, a second and worker, up to which at least `ATTAINMENT` of the requests keep both objectives,
linear between the rates of the sweep; who is refused has not kept them. The sweep goes on above its last rate where
that many still do. A ratio is the hybrid's capacity over that of the best other for this very cell; None where no
set-up carries anything.

A queue that grows slowly keeps the objectives for a while: `lasting` says what share keeps them at these capacities in
a run that is twice as long. Far below `ATTAINMENT`, the capacity is one of a short run, and longer ones have to judge.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from cluster_sim.reports.figures import Figures
from cluster_sim.scenario import Scenario, make_world, workload_of
from cluster_sim.workloads.requests import Workload

ATTAINMENT = 0.9
HYBRID = "hybrid"
DEFLECTION = "deflection_50"
TAICHI = "taichi_50"
_OF_OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    DEFLECTION: {"rule": "deflection", "prefill_heavy": 0.5, "refuses": False},
    TAICHI: {"rule": "length_aware", "prefill_heavy": 0.5, "refuses": False},
    HYBRID: {},
}
# Rules of others that go by the objectives.
PUBLISHED = (DEFLECTION, TAICHI)
WARM_UP = 0.25
_ALPHA = 0.95
_BEYOND = 1.5
_LASTING = 2.0
# Of Mooncake's trace: where interactive services are.
CORE_TTFT_S = (2.0, 5.0)
CORE_TPOT_MS = (15.0, 50.0)
_CORE_TRACE = "mooncake"
# Long answers to short prompts that share nothing; conversations of a tenth of Mooncake's tokens and a half.
DRAWN: Mapping[str, Mapping[str, Any]] = {
    "decode_heavy": {
        "kind": "prefix_groups", "groups": 100_000, "shared_tokens": 0, "own_tokens": 500, "output_tokens": 1500
    },
    "short_conversation": {"kind": "conversation", "token_scale": 0.15, "block_tokens": 32},
}  # fmt: skip

RATES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.375, 1.5, 1.75, 2.0, 2.5)
_FEW = {"rates": RATES[1::2], "splits": (0.25, 0.5, 0.625), "seconds": 80.0}
# A sweep goes on where the objectives are kept at its last rate: each further rate so many times the one before.
_STEP_UP = 1.4
_MOST_STEPS_UP = 8
# How much of a `GridStudy` is asked for. In a quick one the noise of some 500 requests a run is part of each figure.
EFFORTS: Mapping[str, Mapping[str, Any]] = {
    "quick": {**_FEW, "sizes": (8,), "seeds": (0,)},
    "usual": {**_FEW, "sizes": (4, 16), "seeds": (0, 1, 2)},
    "full": {
        "rates": RATES, "splits": (0.25, 0.375, 0.5, 0.625, 0.75), "seconds": 240.0, "sizes": (4, 16, 64),
        "seeds": (0, 1, 2),
    },
}  # fmt: skip


class Mapped(Protocol):
    """The results of `function` for each of these, in order."""

    def __call__(self, function: Callable[[Any], Any], each: Iterable[Any], /) -> Iterable[Any]: ...


@dataclass(frozen=True, slots=True)
class GridStudy:
    """What is simulated. kind: of workload, or a name of `DRAWN`; of a file `trace`. rates: requests a second for each
    worker, ascending. splits: shares of workers that prefill. seconds: of arrivals, the first quarter warms up."""

    kind: str
    file: Path | None
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    splits: tuple[float, ...]
    seeds: tuple[int, ...]
    seconds: float
    cost_model: str = "h100-llama-3.1-8b"
    ttft_s: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0)
    tpot_ms: tuple[float, ...] = (15.0, 25.0, 50.0, 100.0)
    # Beyond the last rate, where the objectives are kept at it.
    goes_on: bool = False
    # Of a scenario's pools, beside how many workers there are.
    pools: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ladder(self) -> tuple[float, ...]:
        """The rates, and those at which the sweep may go on."""
        more = _MOST_STEPS_UP if self.goes_on else 0
        return *self.rates, *(round(self.rates[-1] * _STEP_UP**step, 3) for step in range(1, more + 1))

    @property
    def trace(self) -> str:
        return self.kind if self.file is None else self.file.stem

    @property
    def cells(self) -> list[tuple[float, float]]:
        """(TTFT in s, TPOT in ms)."""
        return [(ttft_s, tpot_ms) for ttft_s in self.ttft_s for tpot_ms in self.tpot_ms]

    @property
    def others(self) -> list[str]:
        return [*(f"pools_{share * 100:g}" for share in self.splits), "shared", "lmetric"]

    @property
    def steps(self) -> int:
        """Of progress, where no sweep goes on: a rate of one of the others, or a cell of those that have objectives."""
        return len(self.sizes) * (len(self.others) * len(self.rates) + len(self.cells))


def measure(study: GridStudy, progress: Callable[[str], None], mapped: Mapped = map) -> dict[str, Any]:
    """All cells, and of them the lowest ratio (`worst_ratio`) and those of the core. mapped: as `map` does, in order;
    what a pool of processes has for it."""
    cells = [cell for size in study.sizes for cell in _cells_of(study, size, progress, mapped)]
    ratios = [cell["ratio"] for cell in cells if cell["ratio"] is not None]
    core = [cell["ratio"] for cell in cells if cell["core"] and cell["ratio"] is not None]
    beyond = [cell["beyond"] for cell in cells if cell["beyond"] is not None]
    return {
        "trace": study.trace,
        "cost_model": study.cost_model,
        "attainment": ATTAINMENT,
        "seeds": list(study.seeds),
        "seconds": study.seconds,
        "rates_per_worker": list(study.rates),
        "goes_on": study.goes_on,
        "worst_ratio": min(ratios, default=None),
        "mean_ratio": round(fmean(ratios), 3) if ratios else None,
        "core_ratio": min(core, default=None),
        "core_mean_ratio": round(fmean(core), 3) if core else None,
        "worst_beyond": min(beyond, default=None),
        "lost_cells": sum(ratio < 1 for ratio in ratios),
        "cells": cells,
    }


def _cells_of(study: GridStudy, size: int, progress: Callable[[str], None], mapped: Mapped) -> Iterator[dict[str, Any]]:
    # Shares by cell, at each rate; by set-up.
    others: dict[str, dict[float, list[float]]] = {name: {} for name in study.others}

    def run(rates: Iterable[float]) -> None:
        runs = [(name, rate) for rate in rates for name in study.others]
        for (name, rate), shares in zip(runs, mapped(partial(_others_run, study, size), runs), strict=True):
            progress(f"{name}, {size} workers, {rate * size:g} requests/s")
            others[name][rate] = shares

    # The highest rates first: they take longest.
    run(reversed(study.rates))
    for before, rate in zip(study.ladder, study.ladder[1:], strict=False):
        if before >= study.rates[-1] and max(max(shares[before]) for shares in others.values()) >= ATTAINMENT:
            run([rate])
        elif before >= study.rates[-1]:
            break
    carried = [
        {name: _capacity_at({rate: each[place] for rate, each in shares.items()}) for name, shares in others.items()}
        for place in range(len(study.cells))
    ]
    asked = list(zip(study.cells, carried, strict=True))
    for (objectives, _), cell in zip(asked, mapped(partial(_cell, study, size), asked), strict=True):
        progress(f"{HYBRID}, {size} workers, {objectives[0]:g} s by {objectives[1]:g} ms")
        yield cell


def _others_run(study: GridStudy, size: int, run: tuple[str, float]) -> list[float]:
    name, rate = run
    return _attainments(study, name, size, rate)


def _cell(study: GridStudy, size: int, asked: tuple[tuple[float, float], Mapping[str, float]]) -> dict[str, Any]:
    """asked: the objectives, and what each of the others carries under them."""
    (ttft_s, tpot_ms), carried = asked
    most = max(carried.values())
    carried = {
        **carried,
        **{name: _capacity_at(_OfCell(name, study, size, ttft_s, tpot_ms).shares(most)) for name in PUBLISHED},
    }
    best = max(carried, key=lambda name: carried[name])
    hybrid = _OfCell(HYBRID, study, size, ttft_s, tpot_ms)
    found = hybrid.shares(carried[best])
    own = _capacity_at(found)
    other = _OfCell(best, study, size, ttft_s, tpot_ms)
    return {
        "workers": size,
        "ttft_s": ttft_s,
        "tpot_ms": tpot_ms,
        "core": _CORE_TRACE in study.trace and _within(ttft_s, CORE_TTFT_S) and _within(tpot_ms, CORE_TPOT_MS),
        "capacity": {**{name: round(each, 4) for name, each in carried.items()}, HYBRID: round(own, 4)},
        "best_other": best if carried[best] else None,
        "ratio": _ratio(own, carried[best]),
        "attainment": {f"{rate:g}": round(share, 4) for rate, share in found.items()},
        "lasting": {"other": other.lasting(carried[best]), HYBRID: hybrid.lasting(own)},
        **hybrid.at(own),
    }


class _OfCell:
    """A set-up under the objectives of one cell."""

    def __init__(self, name: str, study: GridStudy, size: int, ttft_s: float, tpot_ms: float) -> None:
        self._name = name
        self._size = size
        self._study = study
        self._objectives = (ttft_s, tpot_ms)

    def shares(self, start: float) -> dict[float, float]:
        """By rate, of the requests that keep both objectives; around this rate."""
        return around(self._study.ladder, start, self._attainment)

    def lasting(self, rate: float) -> float | None:
        """Of the requests at this rate for so much longer, the share that keeps both objectives; by the first seed."""
        if not rate:
            return None
        longer = replace(self._study, seconds=self._study.seconds * _LASTING)
        return round(self._share(self._simulate(longer, rate, longer.seeds[0])), 4)

    def at(self, rate: float) -> dict[str, float | None]:
        """At its capacity: P99 of TPOT over its objective, and shares of it that are refused and that are carried at a
        load of half as much again (`beyond`)."""
        if not rate:
            return {"tpot_p99_over_objective": None, "refused": None, "beyond": None}
        there, beyond = (self._simulate(self._study, load, self._study.seeds[0]) for load in (rate, rate * _BEYOND))
        return {
            "tpot_p99_over_objective": round(there.tpot_s.quantile(0.99) * 1000 / self._objectives[1], 3),
            "refused": round(there.outcomes.get("refused", 0) / there.requests, 4),
            "beyond": round(beyond.attainment * _BEYOND / there.attainment, 3) if there.attainment else None,
        }

    def _attainment(self, rate: float) -> float:
        return fmean(self._share(self._simulate(self._study, rate, seed)) for seed in self._study.seeds)

    def _simulate(self, study: GridStudy, rate: float, seed: int) -> Figures:
        return simulate(study, self._name, self._size, rate, seed, self._objectives)

    def _share(self, run: Figures) -> float:
        if self._name in _OF_OBJECTIVES:
            return run.attainment
        return _attained(run)[self._study.cells.index(self._objectives)]


def _capacity_at(shares: Mapping[float, float]) -> float:
    """By rate, in any order."""
    return capacity(sorted(shares), [shares[rate] for rate in sorted(shares)])


def capacity(rates: Sequence[float], shares: Sequence[float]) -> float:
    """rates: ascending, each with the share that keeps the objectives. 0 where no rate has enough of them; the highest
    rate where that one has."""
    kept = [place for place, share in enumerate(shares) if share >= ATTAINMENT]
    if not kept:
        return 0.0
    last = kept[-1]
    if last + 1 == len(rates):
        return rates[last]
    above, below = shares[last], shares[last + 1]
    return rates[last] + (above - ATTAINMENT) / (above - below) * (rates[last + 1] - rates[last])


def around(rates: Sequence[float], start: float, share_at: Callable[[float], float]) -> dict[float, float]:
    """Shares by rate, ascending: the first rate above `start`, and from there up to the first that has too few of the
    requests, or down to the first that has enough."""
    place = next((place for place, rate in enumerate(rates) if rate > start), len(rates) - 1)
    found = {rates[place]: share_at(rates[place])}
    has_enough = found[rates[place]] >= ATTAINMENT
    step = 1 if has_enough else -1
    while 0 <= place + step < len(rates) and (found[rates[place]] >= ATTAINMENT) == has_enough:
        place += step
        found[rates[place]] = share_at(rates[place])
    return dict(sorted(found.items()))


def requests_of(study: GridStudy, size: int, rate: float, seed: int) -> Workload:
    """What every set-up gets."""
    return workload_of(Scenario.model_validate(_scenario(study, HYBRID, size, rate, seed, study.cells[0])))


def simulate(
    study: GridStudy, name: str, size: int, rate: float, seed: int, objectives: tuple[float, float] = (5.0, 50.0)
) -> Figures:
    """One run. rate: of each worker. objectives: (TTFT in s, TPOT in ms) of what goes by them; others have all."""
    scenario = Scenario.model_validate(_scenario(study, name, size, rate, seed, objectives))
    workload = workload_of(scenario)
    cells = () if name in _OF_OBJECTIVES else tuple((ttft_s, tpot_ms / 1000) for ttft_s, tpot_ms in study.cells)
    return make_world(scenario, block_tokens=workload.block_tokens, objectives=cells).run(workload)


def _attainments(study: GridStudy, name: str, size: int, rate: float) -> list[float]:
    """Of each cell, the mean over the seeds."""
    runs = [simulate(study, name, size, rate, seed) for seed in study.seeds]
    return [fmean(shares) for shares in zip(*map(_attained, runs), strict=True)]


def _attained(run: Figures) -> list[float]:
    """Of each cell."""
    return [kept / run.measured if run.measured else 0.0 for kept in run.attained_of]


def _scenario(
    study: GridStudy, name: str, size: int, rate: float, seed: int, objectives: tuple[float, float]
) -> dict[str, Any]:
    share = float(name.removeprefix("pools_")) / 100 if name.startswith("pools_") else 0.0
    prefill = min(size - 1, max(1, round(size * share))) if share else 0
    decode: dict[str, Any] = {**study.pools, "workers": size - prefill, "pulled_first": True}
    workload = {"kind": study.kind, "file": study.file, **DRAWN.get(study.kind, {})}
    return {
        "name": name,
        "seed": seed,
        "cost_model": study.cost_model,
        "pools": {
            "prefill": {**study.pools, "workers": prefill},
            "decode": {**decode, "chunk_bound": _ALPHA} if name in _OF_OBJECTIVES else decode,
        },
        "placement": {"policy": "lmetric" if name == "lmetric" else "hotness", "disaggregation": "conditional"},
        "both": _OF_OBJECTIVES.get(name),
        "warm_up_s": study.seconds * WARM_UP,
        "slo": {"ttft_ms": objectives[0] * 1000, "tpot_ms": objectives[1]},
        "workload": {
            **workload,
            "requests": round(study.seconds * rate * size),
            "arrivals": "poisson",
            "requests_per_s": rate * size,
        },
    }


def _ratio(own: float, other: float) -> float | None:
    """None where there is nothing to compare with."""
    return round(own / other, 3) if other else None


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]
