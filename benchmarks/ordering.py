"""How long a policy takes to order contenders: the part of a step that Stream2LLM adds to every one.

Every run orders contenders whose values are drawn at random, in random order; in service the table of requests is
mostly in order of arrival already, which is faster. Source of the figure to compare with: Stream2LLM
(arXiv:2604.16395), 165 us at P99 for 500.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster_core.clock import monotonic_s
from prefill_worker.policies import POLICIES, Contender, Policy, Tenure, make_policy

SIZES = (10, 50, 500)
RUNS = 2_000
# Other values for so many of the runs.
SNAPSHOTS = 20
WARM_UP_RUNS = 20
NOW_S = 100.0
STARVATION_S = 5.0


@dataclass(frozen=True, slots=True)
class Ordering:
    """Microseconds of one call."""

    p50_us: float
    p99_us: float
    runs: int


def ordering_table(on_done: Callable[[], None], seed: int = 0) -> dict[str, dict[int, Ordering]]:
    """By policy and number of contenders. `on_done` is called after each of those."""
    rng = random.Random(seed)
    table: dict[str, dict[int, Ordering]] = {name: {} for name in POLICIES}
    for size in SIZES:
        snapshots = [random_contenders(rng, size) for _ in range(SNAPSHOTS)]
        for name in POLICIES:
            table[name][size] = measure_ordering(make_policy(name, STARVATION_S), snapshots, RUNS)
            on_done()
    return table


def measure_ordering(
    policy: Policy, snapshots: Sequence[Sequence[Contender]], runs: int, clock_s: Callable[[], float] = monotonic_s
) -> Ordering:
    """Orders the snapshots in turn, `runs` times in all."""
    for run in range(WARM_UP_RUNS):
        policy(snapshots[run % len(snapshots)], NOW_S)
    took_us = []
    for run in range(runs):
        contenders = snapshots[run % len(snapshots)]
        began_s = clock_s()
        policy(contenders, NOW_S)
        took_us.append((clock_s() - began_s) * 1e6)
    return Ordering(float(np.quantile(took_us, 0.5)), float(np.quantile(took_us, 0.99)), runs)


def random_contenders(rng: random.Random, count: int) -> list[Contender]:
    """Half complete, half waiting, some of these overdue."""
    return [
        Contender(
            request_id=f"session-{index}",
            complete=rng.random() < 0.5,
            arrival_s=rng.uniform(0, NOW_S),
            last_chunk_s=rng.uniform(0, NOW_S),
            waiting_since_s=rng.uniform(NOW_S - 2 * STARVATION_S, NOW_S) if rng.random() < 0.5 else math.inf,
            computed_tokens=rng.randrange(8192),
            tenure=rng.choice(list(Tenure)),
            queue_index=rng.randrange(count),
            survival=rng.random(),
        )
        for index in range(count)
    ]
