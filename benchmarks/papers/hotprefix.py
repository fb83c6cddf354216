"""HotPrefix (SIGMOD 2025, doi 10.1145/3749168), Figures 8, 9, 13, 14, 15 and Table 1, over the tiers of a worker.

What stands in for what: the light engine over the roofline of its A6000 with Llama-2 13B, in blocks of 16 tokens; host
memory as large as the device's KV, as published. The data sets are not here: prompts are drawn with the shots, groups
and mean lengths that are published of them (`cluster_sim.workloads.few_shot`), and a chain of thought is as long as its
question. All requests wait from the start, and the published batch size runs at a time. The text gives ranges over
data sets, so a cell is set beside a range; what is only drawn is not compared. Hits are tokens that need not be
computed, on the device or loaded from host memory. Offload time is what all copies take; as in the paper it counts as
latency, though workers of this project copy in the background. Nothing is tuned, for a figure or a cell.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.papers.table import Cell, Progress
from benchmarks.prefix_cache.replay import RECIPES
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import CostModel
from cluster_sim.engines.engine import OutcomeKind, SimJob
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.traces import Trace
from kv_transfer.tiers.settings import TierSettings
from kv_transfer.tiers.tier_terms import Admission

MODEL = "a6000-llama-2-13b"
BLOCK_TOKENS = 16
SEED = 0
_REQUESTS = 4000
_QUICK_REQUESTS = 400
# Section 5.2 and section 5.3.
BATCHES = {"mmlu": 64, "hellaswag": 32, "bbh": 64, "ceval": 32}
ABLATION_BATCHES = {"mmlu": 32, "hellaswag": 32, "ceval": 4}

_HOTPREFIX = RECIPES["hotprefix"].settings
_FASTER = "times as fast"
_EVICTIONS = ("lru", "lfu", "fifo", "2q")
# Without host memory: SGLang and its variants; vLLM's blocks are no coarser than everybody's here.
_DEVICE_ONLY: Mapping[str, TierSettings] = {
    **{name: RECIPES[name].with_host_of(0).settings for name in _EVICTIONS},
    "E": RECIPES["E"].settings,
}
_WITH_HOST: Mapping[str, TierSettings] = {
    "hotprefix": _HOTPREFIX,
    "rachis": RECIPES["rachis"].settings,
    "A+P": RECIPES["A+P"].settings,
    "unselective": replace(_HOTPREFIX, rules=replace(_HOTPREFIX.rules, admission=Admission.EVERYTHING)),
    **{f"A+P with {name}": replace(_HOTPREFIX, eviction=name) for name in _EVICTIONS},
}

# Printed in the text: (least, most) over the data sets.
_FIGURE_8 = {"lru": (1.17, 2.38), "lfu": (1.16, 2.28), "fifo": (1.19, 2.56), "2q": (1.17, 2.51), "vllm": (1.11, 3.27)}
_FIGURE_9 = {"lru": (1.55, 2.00), "lfu": (1.45, 1.89), "fifo": (1.55, 1.92), "2q": (1.41, 1.90), "vllm": (1.54, 2.25)}
_TABLE_1 = {"mmlu": 25.66, "bbh": 24.8, "ceval": 68.28, "hellaswag": 27.03}
_FIGURE_13_HITS = {"mmlu": 0.998, "ceval": 0.90, "hellaswag": 0.95}
_FIGURE_14 = {
    "E": ((1.02, 1.11), (1.02, 1.44)),
    "A+P": ((1.30, 1.56), (1.19, 1.47)),
    "hotprefix": ((1.32, 1.92), (1.65, 1.77)),
}
_FIGURE_15 = {"lru": (1.11, 1.37), "lfu": (1.07, 1.89), "fifo": (1.13, 1.63), "2q": (1.02, 1.34)}


@dataclass(frozen=True, slots=True)
class Ran:
    """One policy over one data set."""

    hit_ratio: float
    # Without copies.
    engine_s: float
    # Of all copies between the tiers.
    offload_s: float
    requests: int

    @property
    def latency_s(self) -> float:
        return self.engine_s + self.offload_s


class _CopiesCounted:
    """A cost model that remembers how long all the copies took that were asked for."""

    def __init__(self, base: CostModel) -> None:
        self._base = base
        self.copied_s = 0.0

    def load_s(self, tokens: int) -> float:
        return self._counted(self._base.load_s(tokens))

    def store_s(self, tokens: int) -> float:
        return self._counted(self._base.store_s(tokens))

    def _counted(self, seconds: float) -> float:
        self.copied_s += seconds
        return seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def ran(trace: Trace, settings: TierSettings, batch: int, device_tokens: int, host_tokens: int) -> Ran:
    """All of the trace in one batch job."""
    model: Any = _CopiesCounted(catalog.load(MODEL))
    engine = LightEngine(
        model,
        LightEngineSettings(
            trace.block_tokens,
            device_tokens // trace.block_tokens,
            host_tokens // trace.block_tokens,
            max_running_requests=batch,
            tiers=settings,
        ),
    )
    prompt_tokens = 0
    for number, request in enumerate(trace):
        full = request.input_tokens // trace.block_tokens
        # Zero is no name of a block.
        keys = np.array(request.hashes[:full], dtype=np.uint64) + np.uint64(1)
        prompt_tokens += request.input_tokens
        engine.add(SimJob(number, request.input_tokens, keys, request.output_tokens), 0.0)
    left, now_s = len(trace.requests), 0.0
    while left:
        now_s = engine.next_s()
        for outcome in engine.advance(now_s):
            assert outcome.kind is not OutcomeKind.REFUSED, f"request {outcome.job.number} does not fit the device"
            left -= outcome.kind is OutcomeKind.FINISHED
    totals = engine.totals
    hits = totals.device_hit_tokens + totals.host_hit_tokens
    return Ran(hits / prompt_tokens, now_s, model.copied_s, len(trace.requests))


class _Runs:
    """Runs each combination once."""

    def __init__(self, progress: Progress, requests: int) -> None:
        self._progress = progress
        self._requests = requests
        self._done: dict[tuple[str, int, str], Ran] = {}
        self._device_tokens = catalog.load(MODEL).device_tokens

    def of(self, data_set: str, batch: int, policy: str) -> Ran:
        key = (data_set, batch, policy)
        if key not in self._done:
            self._progress(f"HotPrefix: {data_set}, batch {batch}, {policy}")
            shape = SHAPES[data_set]
            trace = generated(
                shape, requests=min(self._requests, sum(shape.queries)), block_tokens=BLOCK_TOKENS, seed=SEED
            )
            settings = _DEVICE_ONLY.get(policy) or _WITH_HOST[policy]
            host_tokens = 0 if policy in _DEVICE_ONLY else self._device_tokens
            self._done[key] = ran(trace, settings, batch, self._device_tokens, host_tokens)
        return self._done[key]


def run(progress: Progress, *, quick: bool) -> list[Cell]:
    """quick: a few hundred requests of one data set; the figures mean less."""
    runs = _Runs(progress, _QUICK_REQUESTS if quick else _REQUESTS)
    kept = ("mmlu",) if quick else tuple(BATCHES)
    batches = {name: batch for name, batch in BATCHES.items() if name in kept}
    ablation = {name: batch for name, batch in ABLATION_BATCHES.items() if name in kept}
    cells: list[Cell] = []
    for make in (_figure_8, _figure_9, _table_1):
        cells += make(runs, batches)
    for make in (_figure_13, _figure_14, _figure_15):
        cells += make(runs, ablation)
    return [_explained(each) for each in cells]


def _against(
    runs: _Runs,
    batches: Mapping[str, int],
    figure: str,
    unit: str,
    printed: Mapping[str, tuple[float, float]],
    gain: Callable[[Ran, Ran], float],
) -> list[Cell]:
    """HotPrefix over each baseline, and this project's default beside it."""
    cells = []
    for name, batch in batches.items():
        for baseline, paper in printed.items():
            other = runs.of(name, batch, "lru" if baseline == "vllm" else baseline)
            cells.append(
                Cell(
                    figure, f"{name}, over {baseline}", unit, paper, gain(runs.of(name, batch, "hotprefix"), other),
                    "vLLM's blocks are as coarse as all here: as lru" if baseline == "vllm" else "",
                )
            )  # fmt: skip
        ours = gain(runs.of(name, batch, "rachis"), runs.of(name, batch, "lru"))
        cells.append(Cell(figure, f"{name}, Rachis' default over lru", unit, None, ours, "not in the paper"))
    return cells


def _figure_8(runs: _Runs, batches: Mapping[str, int]) -> list[Cell]:
    return _against(runs, batches, "Figure 8: hit ratio", "times the hit ratio", _FIGURE_8, _hits)


def _figure_9(runs: _Runs, batches: Mapping[str, int]) -> list[Cell]:
    return _against(runs, batches, "Figure 9: latency", _FASTER, _FIGURE_9, _speed)


def _table_1(runs: _Runs, batches: Mapping[str, int]) -> list[Cell]:
    """Scaled to the data set's size where fewer requests were run."""
    cells = []
    for name, batch in batches.items():
        whole = runs.of(name, batch, "hotprefix")
        scale = sum(SHAPES[name].queries) / whole.requests
        why = "with loads on demand, each time that a prefix is found in host memory; the paper has promotions alone"
        cells.append(Cell("Table 1: offload time", name, "s", _TABLE_1[name], whole.offload_s * scale, why))
    return cells


def _figure_13(runs: _Runs, batches: Mapping[str, int]) -> list[Cell]:
    figure, cells = "Figure 13: selective admission", list[Cell]()
    for name, batch in batches.items():
        whole, unselective = runs.of(name, batch, "hotprefix"), runs.of(name, batch, "unselective")
        less = unselective.offload_s / whole.offload_s if whole.offload_s else None
        why = "copies follow a computed block here, evicted or not"
        cells += [
            Cell(figure, f"{name}, hit ratio kept", "share", _FIGURE_13_HITS[name], _hits(whole, unselective), why),
            Cell(figure, f"{name}, less offload time", "times", (10, 65), less, why),
            Cell(figure, f"{name}, latency", _FASTER, (1.28, 3.54), _speed(whole, unselective), why),
        ]
    return cells


def _figure_14(runs: _Runs, batches: Mapping[str, int]) -> list[Cell]:
    figure, cells = "Figure 14: components over the baseline", list[Cell]()
    for name, batch in batches.items():
        baseline = runs.of(name, batch, "lru")
        for parts, (hits, speed) in _FIGURE_14.items():
            title = "E+A+P" if parts == "hotprefix" else parts
            found = runs.of(name, batch, parts)
            cells += [
                Cell(figure, f"{name}, {title}, hit ratio", "times", hits, _hits(found, baseline)),
                Cell(figure, f"{name}, {title}, latency", _FASTER, speed, _speed(found, baseline)),
            ]
        whole, without = runs.of(name, batch, "hotprefix"), runs.of(name, batch, "A+P")
        less = without.offload_s / whole.offload_s if whole.offload_s else None
        cells += [
            Cell(figure, f"{name}, E+A+P over A+P, hit ratio", "times", 1.07, _hits(whole, without)),
            Cell(figure, f"{name}, E+A+P over A+P, offload time", "times less", 7.77, less),
            Cell(figure, f"{name}, E+A+P over A+P, latency", _FASTER, 1.38, _speed(whole, without)),
        ]
    return cells


def _figure_15(runs: _Runs, batches: Mapping[str, int]) -> list[Cell]:
    figure, cells = "Figure 15: eviction policies, with admission and promotion", list[Cell]()
    for name, batch in batches.items():
        whole = runs.of(name, batch, "hotprefix")
        for eviction, speed in _FIGURE_15.items():
            other = runs.of(name, batch, f"A+P with {eviction}")
            cells += [
                Cell(figure, f"{name}, over {eviction}, latency", _FASTER, speed, _speed(whole, other)),
                Cell(figure, f"{name}, over {eviction}, hit ratio", "times", None, _hits(whole, other), "only drawn"),
            ]
    return cells  # fmt: skip


def _hits(found: Ran, baseline: Ran) -> float:
    return found.hit_ratio / baseline.hit_ratio if baseline.hit_ratio else float("inf")


def _speed(found: Ran, baseline: Ran) -> float:
    return baseline.latency_s / found.latency_s


def _explained(cell: Cell) -> Cell:
    """With what holds for all cells of its data set."""
    data_set = cell.cell.split(",")[0]
    reasons = [cell.why]
    if data_set == "hellaswag":
        reasons.append("all prompts share one prefix, which no policy loses; the paper does not say what else it had")
    if SHAPES[data_set].chain_of_thought and cell.unit == _FASTER:
        reasons.append("the answers' length is assumed; they take most of the time, and no cache saves it")
    return replace(cell, why="; ".join(each for each in reasons if each))
