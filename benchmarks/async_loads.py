"""What a load from host memory costs those who are computed meanwhile, and its own request: by where it runs.

One engine with vLLM's scheduler in simulated time, costs of an H100 with an 8B model: `answers` are decoded all the
time, and every `every_s` a prompt comes whose first `prefix_tokens` lie in host memory, and nowhere else. Loads are
synchronous, asynchronous, or as the rule of `kv_transfer.tiers.async_loads` has it.
Run it: python -m benchmarks.async_loads
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest import mock

import numpy as np

from cluster_sim.costs import catalog
from cluster_sim.engines.engine import OutcomeKind, SimJob
from cluster_sim.engines.vllm_engine import VllmSimEngine
from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings
from kv_transfer.tiers.async_loads import AsyncLoads
from kv_transfer.tiers.settings import TierSettings
from kv_transfer.tiers.tier_terms import Admission, TierRules

_BLOCK_TOKENS = 16
_OWN_TOKENS = 64
_ANSWER_TOKENS = 1000
_PREFIXES = 24
_RULE = AsyncLoads.is_cheaper
WAYS: dict[str, Callable[[AsyncLoads, float, int], bool]] = {
    "synchronous": lambda loads, load_s, others: False,
    "asynchronous": lambda loads, load_s, others: others > 0,
    "as is cheaper": _RULE,
}


@dataclass(frozen=True, slots=True)
class Scene:
    answers: int
    prefix_tokens: int
    every_s: float = 0.25
    prompts: int = 24
    # Whether steps alike are taken at once, as simulations do; the times of steps are then those of several.
    leaps: bool = False


SCENES = (Scene(1, 8192), Scene(8, 8192), Scene(64, 4096), Scene(64, 8192), Scene(128, 16384))


@dataclass(frozen=True, slots=True)
class Figures:
    """In milliseconds. step_p99: of steps that decode, from one end to the next. ttft_p50: of the prompts.

    loaded_share, async_share: of the tokens in host memory those that were loaded at all, and asynchronously.
    """

    step_p50: float
    step_p99: float
    ttft_p50: float
    loaded_share: float
    async_share: float


def run(scene: Scene, way: str) -> Figures:
    model = catalog.load("h100-llama-3.1-8b")
    of_prefix = scene.prefix_tokens // _BLOCK_TOKENS
    of_answers = scene.answers * (2 + _ANSWER_TOKENS // _BLOCK_TOKENS)
    settings = VllmEngineSettings(
        kind=SchedulerKind.DECODE,
        block_tokens=_BLOCK_TOKENS,
        # Room for a few of the prefixes.
        device_blocks=of_answers + 4 * of_prefix,
        host_blocks=2 * _PREFIXES * of_prefix,
        tiers=TierSettings(
            eviction="lru", copy_blocks=2**20, rules=TierRules(admission=Admission.EVERYTHING, promotion=False)
        ),
        leaps=scene.leaps,
    )
    with mock.patch.object(AsyncLoads, "is_cheaper", WAYS[way]):
        return _figures(VllmSimEngine(model, settings), scene)


def _figures(engine: VllmSimEngine, scene: Scene) -> Figures:
    numbers, names = count(), count(1)
    prefixes = [_names(names, scene.prefix_tokens) for _ in range(_PREFIXES)]
    now_s, asked_s, ttfts = 0.0, dict[int, float](), list[float]()

    def prompt(prefix: Any, output_tokens: int = 1) -> int:
        tokens = len(prefix) * _BLOCK_TOKENS + _OWN_TOKENS
        keys = np.concatenate([prefix, _names(names, _OWN_TOKENS)])
        job = SimJob(next(numbers), tokens, keys, output_tokens)
        engine.add(job, now_s)
        return job.number

    def until(end_s: float) -> None:
        nonlocal now_s
        while engine.next_s() <= end_s:
            now_s = engine.next_s()
            for outcome in engine.advance(now_s):
                if outcome.kind is OutcomeKind.FIRST_TOKEN and outcome.job.number in asked_s:
                    ttfts.append(outcome.at_s - asked_s.pop(outcome.job.number))
        now_s = end_s

    for prefix in (*prefixes, *prefixes):
        prompt(prefix)
        until(now_s + 2.0)
    for _ in range(scene.answers):
        prompt(_names(names, _BLOCK_TOKENS), _ANSWER_TOKENS)
    until(now_s + 2.0)
    counters = engine.scheduler.tiers.counters
    before = counters.copied_back, counters.copied_back_async
    ends_s = _watched(engine)
    for index in range(scene.prompts):
        asked_s[prompt(prefixes[index % _PREFIXES])] = now_s
        until(now_s + scene.every_s)
    gaps_ms = 1000 * np.diff(ends_s)
    there = scene.prompts * scene.prefix_tokens // _BLOCK_TOKENS
    loaded, in_async = counters.copied_back - before[0], counters.copied_back_async - before[1]
    p50, p99 = np.percentile(gaps_ms, (50, 99))
    return Figures(float(p50), float(p99), float(1000 * np.median(ttfts)), loaded / there, in_async / there)


def _watched(engine: VllmSimEngine) -> list[float]:
    """Gets the ends of the steps from now on."""
    ends_s = list[float]()
    end = engine._end

    def noted(steps: Any) -> None:
        ends_s.append(steps.end_s)
        end(steps)

    # Nobody else has to know when a step ends.
    engine._end = noted  # type: ignore[method-assign]
    return ends_s


def _names(names: Iterator[int], tokens: int) -> Any:
    return np.array([next(names) for _ in range(tokens // _BLOCK_TOKENS)], dtype=np.uint64)


if __name__ == "__main__":
    for scene in SCENES:
        print(
            f"{scene.answers} answers, a prompt of {scene.prefix_tokens} tokens each {scene.every_s} s, in ms",
            flush=True,
        )
        for way in WAYS:
            found = run(scene, way)
            steps = f"steps P50 {found.step_p50:6.1f}  P99 {found.step_p99:6.1f}"
            print(f"  {way:16} {steps}  TTFT P50 {found.ttft_p50:6.1f}  loaded {found.loaded_share:.0%}", flush=True)
