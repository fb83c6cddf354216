"""The whole system against what one would run without it, on a trace, at several sizes: `rachis bench system`.

Every system gets the same requests at the same rate on the same GPUs, and the split of prefill and decode workers that
is best for it: found at `SPLIT_SIZE` workers by attainment over all rates, and scaled. Simulated by `cluster_sim`
with light engines. Router cores: processor time of placement, in-flight counts, predictions and index, over simulated
time; gRPC and tokenization are not in it.

    rachis                  both pools, placement by hotness, prompts prefilled locally where that is sooner
    rachis_aggregated       the same placement over workers that do both
    disaggregated_formula   both pools, the published cost formula
    disaggregated_proxy     both pools, round robin: vLLM's disaggregation behind a plain proxy
    aggregated_formula      workers that do both, the published cost formula
    aggregated              workers that do both, round robin: plain vLLM replicas

A run has `seconds` of arrivals at every size, and measures who comes after the first quarter of them.
Goodput: requests a second that keep both objectives, of those that arrive; `best` is the highest goodput at a rate at
which at least `ATTAINMENT` of all requests keep them, 0 where no rate of the sweep has that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any

from cluster_sim.reports.figures import Figures, as_json
from cluster_sim.scenario import Scenario, make_world, workload_of
from cluster_sim.world import World

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "rachis": {"policy": "hotness", "disaggregation": "conditional", "pools": 2},
    "rachis_aggregated": {"policy": "hotness", "disaggregation": "conditional", "pools": 1},
    "disaggregated_formula": {"policy": "cost_formula", "disaggregation": "always", "pools": 2},
    "disaggregated_proxy": {"policy": "round_robin", "disaggregation": "always", "pools": 2},
    "aggregated_formula": {"policy": "cost_formula", "disaggregation": "conditional", "pools": 1},
    "aggregated": {"policy": "round_robin", "disaggregation": "conditional", "pools": 1},
}
OURS = "rachis"
ATTAINMENT = 0.9
SPLIT_SIZE = 16
_WARM_UP = 0.25
# Share of the workers that prefill.
SHARES = (0.375, 0.5, 0.625, 0.75)


@dataclass(frozen=True, slots=True)
class Study:
    """What is simulated; objectives in ms."""

    kind: str
    # A trace, or None for `kind` as drawn.
    file: Path | None
    cost_model: str
    sizes: tuple[int, ...]
    # Requests a second for each worker.
    rates: tuple[float, ...]
    slo_ttft_ms: float
    slo_tpot_ms: float
    # Of arrivals.
    seconds: float = 240.0
    seed: int = 0


def measure(study: Study, systems: Sequence[str], progress: Callable[[str], None]) -> dict[str, Any]:
    """By system and size: runs by rate, the best goodput, and who loses to whom."""
    shares = {name: _best_share(study, name, progress) for name in systems}
    sizes = {
        str(size): {name: _swept(study, name, size, shares[name], progress) for name in systems} for size in study.sizes
    }
    return {
        "trace": study.kind if study.file is None else study.file.stem,
        "cost_model": study.cost_model,
        "slo": {"ttft_ms": study.slo_ttft_ms, "tpot_ms": study.slo_tpot_ms, "attainment": ATTAINMENT},
        "rates_per_worker": list(study.rates),
        "prefill_share": shares,
        "sizes": sizes,
        "goodput_of_ours": {size: _ratios(runs) for size, runs in sizes.items()},
    }


@cache
def simulate(study: Study, name: str, size: int, share: float, rate: float) -> tuple[Figures, float]:
    """One run, and the processor time of its router in seconds. Kept: the search for a split has some of the runs."""
    world, workload = _world(study, name, size, share, rate)
    with _RouterTime(world) as router:
        figures = world.run(workload)
    return figures, router.seconds


def _best_share(study: Study, name: str, progress: Callable[[str], None]) -> float:
    if SYSTEMS[name]["pools"] == 1:
        return 0.0
    found = {}
    for share in SHARES:
        progress(f"split of {name}: {share:.0%} prefill")
        found[share] = sum(simulate(study, name, SPLIT_SIZE, share, rate)[0].attainment for rate in study.rates)
    return max(found, key=lambda share: found[share])


def _swept(study: Study, name: str, size: int, share: float, progress: Callable[[str], None]) -> dict[str, Any]:
    runs = []
    for rate in study.rates:
        progress(f"{name}, {size} workers, {rate * size:g} requests/s")
        figures, router_s = simulate(study, name, size, share, rate)
        table = as_json(figures)
        kept = (
            "attainment", "throughput_tokens_per_s", "dollars_per_million_tokens", "ttft_p50_ms",
            "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "hit_ratio", "utilization", "mean_batch",
            "local_prefills", "requests", "outcomes",
        )  # fmt: skip
        runs.append(
            {
                "requests_per_s": rate * size,
                "goodput_per_s": round(figures.attainment * rate * size, 3),
                **{key: table[key] for key in kept},
                "router_cores": round(router_s * rate * size / figures.requests, 4),
            }
        )
    good = [run for run in runs if run["attainment"] >= ATTAINMENT]
    best = max(good, key=lambda run: run["goodput_per_s"], default=None)
    return {
        "runs": runs,
        "best_goodput_per_s": best["goodput_per_s"] if best else 0.0,
        "dollars_per_million_tokens": best["dollars_per_million_tokens"] if best else None,
    }


def _ratios(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Our best goodput over that of each other system; None where that has none."""
    if OURS not in runs:
        return {}
    ours = runs[OURS]["best_goodput_per_s"]
    return {
        name: round(ours / each["best_goodput_per_s"], 3) if each["best_goodput_per_s"] else None
        for name, each in runs.items()
        if name != OURS
    }


def _world(study: Study, name: str, size: int, share: float, rate: float) -> tuple[World, Any]:
    system = SYSTEMS[name]
    prefill = min(size - 1, max(1, round(size * share))) if share else 0
    requests = round(study.seconds * rate * size)
    scenario = Scenario.model_validate(
        {
            "name": name,
            "seed": study.seed,
            "cost_model": study.cost_model,
            "pools": {"prefill": {"workers": prefill}, "decode": {"workers": size - prefill}},
            "placement": {"policy": system["policy"], "disaggregation": system["disaggregation"]},
            "warm_up_s": study.seconds * _WARM_UP,
            "slo": {"ttft_ms": study.slo_ttft_ms, "tpot_ms": study.slo_tpot_ms},
            "workload": {
                "kind": study.kind,
                "file": study.file,
                "requests": requests,
                "arrivals": "poisson",
                "requests_per_s": rate * size,
            },
        }
    )
    workload = workload_of(scenario)
    return make_world(scenario, block_tokens=workload.block_tokens), workload


class _RouterTime:
    """Processor time of a world's placer and index, while it is a context."""

    def __init__(self, world: World) -> None:
        names = ("weigh", "place", "keep", "in_flight")
        self._calls: list[tuple[object, str]] = [(world.index, "apply"), *((world.placer, name) for name in names)]
        self.seconds = 0.0

    def __enter__(self) -> "_RouterTime":
        for owner, name in self._calls:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in self._calls:
            delattr(owner, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began_s = thread_time()
            try:
                result = call(*given, **named)
            finally:
                self.seconds += thread_time() - began_s
            return self._timed_context(result) if isinstance(result, AbstractContextManager) else result

        return timed

    @contextmanager
    def _timed_context(self, context: AbstractContextManager[Any]) -> Iterator[Any]:
        began_s = thread_time()
        entered = context.__enter__()
        self.seconds += thread_time() - began_s
        try:
            yield entered
        finally:
            began_s = thread_time()
            context.__exit__(None, None, None)
            self.seconds += thread_time() - began_s
