"""Placement policies against each other on a trace, on a simulated prefill pool (`benchmarks.placement_world`).

Arrivals: a trace's clock may be coarse (Mooncake's ticks every 3 s). The requests of a tick are spread over it by a
seeded draw, in their order; then all times are divided by `speed`.
Load: engine seconds that `cost_formula` needs for the trace, over workers times the time in which requests arrive. A
policy that finds more in the caches has less to do at the same speed. `speed_for` finds the speed for a load.

Figures: TTFT from arrival to the end of the prefill; hit_ratio: prompt tokens that were not computed, over all;
imbalance: engine seconds of the busiest worker over the mean; load: as above, with the policy's own engine seconds.
A worker's engine seconds are those in which it had a prompt: to load what host memory holds of it, and to compute it.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement_world import Cluster, PlacementWorld, Prompt
from cluster_sim.workloads.requests import block_names
from cluster_sim.workloads.traces import Trace

BASELINE = "cost_formula"
# `speed_for` may miss the load that is wanted by so much.
LOAD_TOLERANCE = 0.005
_MOST_TRIALS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One policy's."""

    # By prompt, in the order of arrival: the worker, seconds to the first token, and of them in the queue.
    placed_on: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    # By worker.
    busy_s: NDArray[np.float64]
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    # From the first arrival to the last.
    arriving_s: float

    @property
    def load(self) -> float:
        return float(self.busy_s.mean()) / self.arriving_s if self.arriving_s else 0.0

    def figures(self) -> dict[str, float]:
        ttft_ms = {f"ttft_p{share}_ms": float(np.quantile(self.ttft_s, share / 100)) * 1000 for share in (50, 90, 99)}
        hit_tokens = self.device_hit_tokens + self.host_hit_tokens
        return {
            **{name: round(ms, 1) for name, ms in ttft_ms.items()},
            "hit_ratio": round(hit_tokens / self.prompt_tokens, 4),
            "imbalance": round(float(self.busy_s.max() / self.busy_s.mean()), 3),
            "device_hit_ratio": round(self.device_hit_tokens / self.prompt_tokens, 4),
            "queue_p90_ms": round(float(np.quantile(self.queue_s, 0.9)) * 1000, 1),
            "ttft_mean_ms": round(float(self.ttft_s.mean()) * 1000, 1),
            "load": round(self.load, 4),
        }


def prompts_of(trace: Trace, seed: int = 0) -> list[Prompt]:
    """Full blocks only, under names that look like the index's; arrivals spread as the module says, from 0 on."""
    arrivals_s = _spread([request.arrival_s for request in trace], random.Random(seed))
    return [
        Prompt(
            number, arrival_s - arrivals_s[0], request.input_tokens, request.output_tokens,
            block_names(np.array(request.hashes[: request.input_tokens // trace.block_tokens], dtype=np.uint64)),
        )
        for number, (arrival_s, request) in enumerate(zip(arrivals_s, trace, strict=True))
    ]  # fmt: skip


def at_speed(prompts: Iterable[Prompt], speed: float) -> list[Prompt]:
    return [replace(each, arrival_s=each.arrival_s / speed) for each in prompts]


def speed_for(
    load: float, prompts: Sequence[Prompt], cluster: Cluster, done: Callable[[int], None]
) -> tuple[float, Run]:
    """The speed at which `BASELINE` has this load, and its run at that speed. prompts: at speed 1, not all at once.

    Where what is cached depends on speed more than a few trials can follow, the last one is taken.
    """
    speed = 1.0
    if prompts:
        work_s = sum(cluster.costs.prefill_s(each.tokens, 0, 0) for each in prompts)
        speed = load * cluster.workers * max(prompts[-1].arrival_s, 1e-9) / work_s
    for _ in range(_MOST_TRIALS):
        run = simulate(at_speed(prompts, speed), BASELINE, cluster, done)
        if abs(run.load - load) <= LOAD_TOLERANCE or not run.load:
            break
        last, speed = speed, speed * load / run.load
    else:
        speed = last
    return speed, run


def simulate(prompts: Sequence[Prompt], policy: str, cluster: Cluster, done: Callable[[int], None]) -> Run:
    """prompts: by arrival. done: called with 1 for each prompt placed. Raises KeyError for an unknown policy."""
    world = PlacementWorld(policy, cluster, sum(len(each.keys) for each in prompts))
    placed_on = np.full(len(prompts), -1, dtype=np.int64)
    ttft_s, queue_s, busy_s = np.zeros(len(prompts)), np.zeros(len(prompts)), np.zeros(cluster.workers)
    for each in world.run(prompts, done):
        number, arrival_s = each.prompt.number, each.prompt.arrival_s
        placed_on[number] = each.worker
        ttft_s[number], queue_s[number] = each.ended_s - arrival_s, each.begun_s - arrival_s
        busy_s[each.worker] += each.ended_s - each.begun_s
    return Run(
        placed_on,
        ttft_s,
        queue_s,
        busy_s,
        prompt_tokens=sum(each.tokens for each in prompts),
        device_hit_tokens=sum(each.totals.device_hit_tokens for each in world.engines),
        host_hit_tokens=sum(each.totals.host_hit_tokens for each in world.engines),
        arriving_s=prompts[-1].arrival_s,
    )


def speedups(runs: Mapping[str, dict[str, Any]], ours: str, share: str) -> dict[str, float]:
    """How many times shorter our TTFT is than each other policy's. share: such as `ttft_p90_ms`."""
    return {
        name: round(figures[share] / runs[ours][share], 3)
        for name, figures in runs.items()
        if name != ours and ours in runs
    }


def _spread(arrivals_s: Sequence[float], rng: random.Random) -> list[float]:
    ticks = sorted(set(arrivals_s))
    if len(ticks) < 2:
        return list(arrivals_s)
    tick_s = float(np.median(np.diff(ticks)))
    # Sorted over all of the trace: where ticks are closer than the typical one the order stays.
    return sorted(each + rng.random() * tick_s for each in arrivals_s)
