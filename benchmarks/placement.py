"""Placement policies against each other on a trace: a simulated prefill pool behind the router's own parts.

Real are the policies, the prefix index with its predictions, the columns of what is in flight, and the workers' tiers;
simulated are time and the engines (`benchmarks.placement_world`). What a worker holds is told to the index after a
delay. Every policy gets the same arrivals, the same predictions of its own placements, and the same caches.

Arrivals: a trace's clock may be coarse (Mooncake's ticks every 3 s). The requests of a tick are spread over it by a
seeded draw, in their order; then all times are divided by `speed`.
Load: engine seconds that `cost_formula` needs for the trace, over workers times the time in which requests arrive. A
policy that finds more in the caches has less to do at the same speed. `speed_for` finds the speed for a load.

Figures: TTFT from arrival to the end of the prefill; hit_ratio: prompt tokens that were not computed, over all;
imbalance: engine seconds of the busiest worker over the mean; load: as above, with the policy's own engine seconds.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rachis.v1 import worker_pb2 as wire

from benchmarks.placement_costs import PrefillCosts
from benchmarks.placement_world import Caches, Prompt, SimulatedWorker
from cluster_configs.schema import PlacementSection
from cluster_sim.request import job_of
from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.workloads.traces import Trace
from control_plane.fleet.membership import Membership
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.placer import Flight, Placer
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange

BASELINE = "cost_formula"
# Of the load that `speed_for` was asked for it may miss so much.
LOAD_TOLERANCE = 0.005
_MOST_TRIALS = 6
_GENERATION = 1
_HALF_LIFE_S = 60.0
_SPARE_ENTRIES = 1 << 16
_AT_ONCE_S = 1e-9


@dataclass(frozen=True, slots=True)
class Cluster:
    """prediction_s: how long a prompt counts as held by the worker it was sent to; 0: not at all."""

    workers: int
    caches: Caches
    costs: PrefillCosts
    event_delay_s: float = 0.1
    prediction_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One policy's. By prompt, in the order of arrival: workers, seconds to the first token, of them in the queue.

    Engine seconds are those of each worker.
    """

    placed_on: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    busy_s: NDArray[np.float64]
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
    """prompts: by arrival. done: told of each prompt placed. Raises KeyError for an unknown policy."""
    pool = _Pool(prompts, policy, cluster)
    for prompt in prompts:
        pool.advance(prompt.arrival_s)
        pool.place(prompt)
        done(1)
    pool.advance(float("inf"))
    return pool.run()


class _Pool:
    """The workers, the router, and what is still to happen."""

    def __init__(self, prompts: Sequence[Prompt], policy: str, cluster: Cluster) -> None:
        self._cluster = cluster
        self._prompts = prompts
        self._names = [f"prefill-{number:04}" for number in range(cluster.workers)]
        self._workers = [SimulatedWorker[Flight](cluster.caches, cluster.costs) for _ in self._names]
        self.router = SimulatedRouter(self._names, policy, cluster, sum(len(each.keys) for each in prompts))
        # When a worker's running prefill ends; a worker runs one at most.
        self._ends: list[tuple[float, int]] = []
        # In the order of time, as all are late by the same delay.
        self._telling: deque[tuple[float, int, ClaimChange]] = deque()
        self._placed_on = np.full(len(prompts), -1, dtype=np.int64)
        self._began_s = np.full(len(prompts), np.nan)
        self._ended_s = np.full(len(prompts), np.nan)

    def place(self, prompt: Prompt) -> None:
        number, ticket = self.router.place(prompt, prompt.arrival_s)
        self._placed_on[prompt.number] = number
        self._workers[number].add(prompt, ticket)
        self._go_on(number, prompt.arrival_s)

    def advance(self, until_s: float) -> None:
        """All that happens up to that time."""
        while self._ends and self._ends[0][0] <= until_s:
            now_s, number = heapq.heappop(self._ends)
            self._tell(now_s)
            prompt, ticket = self._workers[number].end()
            self._ended_s[prompt.number] = now_s
            self.router.ended(ticket, now_s)
            self._go_on(number, now_s)
        self._tell(until_s)

    def run(self) -> Run:
        assert not np.isnan(self._ended_s).any(), "a prompt was never prefilled"
        arrivals_s = np.array([each.arrival_s for each in self._prompts])
        return Run(
            placed_on=self._placed_on,
            ttft_s=self._ended_s - arrivals_s,
            queue_s=self._began_s - arrivals_s,
            prompt_tokens=sum(each.tokens for each in self._prompts),
            device_hit_tokens=sum(each.device_hit_tokens for each in self._workers),
            host_hit_tokens=sum(each.host_hit_tokens for each in self._workers),
            busy_s=np.array([each.busy_s for each in self._workers]),
            arriving_s=float(arrivals_s[-1]),
        )

    def _go_on(self, number: int, now_s: float) -> None:
        """The worker takes its next prompt if it can, and tells what has changed in its tiers."""
        worker = self._workers[number]
        if not worker.is_running and worker.waiting:
            prompt = worker.next_prompt
            heapq.heappush(self._ends, (now_s + worker.begin(), number))
            self._began_s[prompt.number] = now_s
        change = worker.told()
        if len(change):
            self._telling.append((now_s + self._cluster.event_delay_s, number, change))

    def _tell(self, until_s: float) -> None:
        while self._telling and self._telling[0][0] <= until_s:
            _, number, change = self._telling.popleft()
            self.router.told(self._names[number], change)


class SimulatedRouter:
    """The router's placement in simulated time, for prompts of a trace."""

    def __init__(self, names: Sequence[str], policy: str, cluster: Cluster, entries: int) -> None:
        self._now_s = 0.0
        self._rows = {name: row for row, name in enumerate(names)}
        self._membership = Membership()
        self._membership.replace([_registration(name, cluster) for name in names], 0.0)
        self._index = PrefixIndex(entries + _SPARE_ENTRIES, _HALF_LIFE_S)
        for name in names:
            self._index.join(name, _GENERATION)
        # Without predictions: one that ends as it begins.
        settings = PlacementSection(
            policy=policy,
            prediction_s=cluster.prediction_s or _AT_ONCE_S,
            seed=cluster.seed,
        )
        self._placer = Placer(
            self._membership,
            IndexPorts(
                self._index,
                now_s=lambda: self._now_s,
                record_access=lambda keys: self._index.accessed(keys, self._now_s),
            ),
            settings,
            service_id="",
            chunk_tokens=cluster.caches.block_tokens,
            rng=random.Random(cluster.seed),
            now_s=lambda: self._now_s,
        )

    def place(self, prompt: Prompt, now_s: float) -> tuple[int, Flight]:
        """The worker's number, and what `ended` has to be given."""
        self._now_s = now_s
        request = SimRequest(now_s, prompt.tokens, prompt.output_tokens, prompt.keys)
        job = job_of(prompt.number, request, math.inf)
        self._placer.keep(job)
        placement = self._placer.place(job, wire.POOL_PREFILL)
        assert placement is not None
        return self._rows[placement.worker.worker_id], self._placer.begin(placement)

    def ended(self, ticket: Flight, now_s: float) -> None:
        self._now_s = now_s
        ticket.end()

    def told(self, name: str, change: ClaimChange) -> None:
        self._index.apply(name, change)


def _registration(name: str, cluster: Cluster) -> wire.WorkerRegistration:
    caches = cluster.caches
    return wire.WorkerRegistration(
        worker_id=name,
        generation=_GENERATION,
        pool=wire.POOL_PREFILL,
        state=wire.WORKER_STATE_READY,
        block_size_tokens=caches.block_tokens,
        max_running_requests=1,
        load=wire.WorkerLoad(free_blocks=caches.device_blocks, total_blocks=caches.device_blocks),
        costs=wire.WorkerCosts(
            prefill_s=cluster.costs.fixed_s,
            prefill_s_per_token=cluster.costs.s_per_token,
            prefill_s_per_pair=cluster.costs.s_per_pair,
            load_s_per_token=cluster.costs.load_s_per_token,
        ),
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
