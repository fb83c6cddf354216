"""Does the simulator predict a cluster that computes? The measurement behind `rachis bench simulator --against cpu`.

A real service of one prefill and one decode worker with the built-in model is measured at no load, then loaded with
workloads that were not part of the measurement; the simulator gets the measured costs and the times of the arrivals,
and says what it expects. Rates are shares of the prefill worker's measured time, so that they suit any machine.

    light     Poisson arrivals of short prompts that share nothing
    bursty    bursts (gaps with a coefficient of variation of 3) of prompts that share prefixes in groups
    long_mix  Poisson arrivals, one prompt in eight of them long
    flood     everything at once: what the cluster can do

Each runs `rounds` times with other prompts; a figure is the median of the rounds, on both sides. What other processes
of the machine take is no part of the model: rounds that they disturb are run again, three times as many at most, and
the quietest are taken; `foreign_cores` says what they took. Nothing is tuned to a workload. A throughput below
saturation is little more than the rate of arrivals: `flood` is the one that tells.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rachis import AsyncClient

from benchmarks.quiet import ForeignLoad
from benchmarks.validation.cluster import Cluster, Measured, Prompt, Timed
from benchmarks.validation.comparison import Comparison, compared, tally
from cluster_configs.schema import RachisConfig
from cluster_sim.reports.figures import Figures

# Within which a prediction counts as right.
TOLERANCE = 0.15
# Cores that others may take in a round that counts as quiet, and rounds tried for each that is wanted.
QUIET_CORES = 0.1
ATTEMPTS = 3
# What a service has to be started with: every prompt takes the way through both pools.
SETTINGS: Mapping[str, Any] = {"placement.disaggregation": "always"}
FIGURES = ("ttft_p50_ms", "ttft_mean_ms", "ttft_p90_ms", "e2e_mean_ms", "throughput_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at the cluster, and at its model."""

    requests: int
    tokens: tuple[int, int]
    output_tokens: int
    # Of the prefill worker's time, by what prompts take alone; 0: all at once.
    share: float
    burstiness: float = 1.0
    groups: int = 0
    shared_tokens: int = 0
    # Of the prompts, have `long_tokens`.
    long_share: float = 0.0
    long_tokens: int = 0


LOADS: Mapping[str, Load] = {
    "light": Load(150, (64, 512), 16, 0.2),
    "bursty": Load(150, (32, 192), 16, 0.3, burstiness=3.0, groups=5, shared_tokens=1024),
    "long_mix": Load(120, (64, 256), 24, 0.3, long_share=0.125, long_tokens=3000),
    "flood": Load(48, (128, 512), 48, 0.0),
}


def prompts_of(load: Load, measured: Measured, cluster: Cluster, rng: random.Random) -> list[Prompt]:
    shared = [cluster.fresh(load.shared_tokens) for _ in range(load.groups)]
    drawn: list[tuple[int, ...]] = []
    for _ in range(load.requests):
        own = load.long_tokens if rng.random() < load.long_share else rng.randint(*load.tokens)
        prefix = rng.choice(shared) if shared else ()
        drawn.append((*prefix, *cluster.fresh(own)))
    if not load.share:
        return [Prompt(0.0, tokens, load.output_tokens) for tokens in drawn]
    # Prefixes are computed once each: what a prompt takes is what follows it.
    alone_s = mean(_prefill_s(measured, len(tokens) - load.shared_tokens) for tokens in drawn)
    shape, at_s, prompts = 1 / load.burstiness**2, 0.0, []
    for tokens in drawn:
        prompts.append(Prompt(at_s, tokens, load.output_tokens))
        at_s += rng.gammavariate(shape, alone_s / load.share / shape)
    return prompts


def _prefill_s(measured: Measured, tokens: int) -> float:
    return float(
        np.interp(tokens, [each.tokens for each in measured.prompts], [each.prefill_s for each in measured.prompts])
    )


def seen(timed: Sequence[Timed]) -> dict[str, float]:
    """Of one run of the real cluster."""
    ttft_ms = [each.ttft_s * 1000 for each in timed]
    duration_s = max(each.end_s for each in timed) - min(each.sent_s for each in timed)
    values = (
        median(ttft_ms),
        mean(ttft_ms),
        float(np.quantile(ttft_ms, 0.9)),
        mean(each.end_s - each.sent_s for each in timed) * 1000,
        sum(len(each.token_s) for each in timed) / duration_s,
    )
    return dict(zip(FIGURES, values, strict=True))


def parts_of(timed: Sequence[Timed]) -> dict[str, float]:
    """Where the time of one run went, for who looks for the cause of a miss: medians, in milliseconds."""
    return {
        "engine_prefill_ms": round(median(each.prefill_s for each in timed) * 1000, 2),
        "queue_and_hops_ms": round(median(each.ttft_s - each.prefill_s for each in timed) * 1000, 2),
        "hand_off_ms": round(median(each.gap_s for each in timed) * 1000, 2),
        "later_tokens_ms": round(
            median((each.end_s - each.token_s[1]) / (len(each.token_s) - 2) for each in timed) * 1000, 2
        ),
    }


def predicted(figures: Figures, first_s: float) -> dict[str, float]:
    """Of one simulated run. first_s: when its first request arrived."""
    values = (
        figures.ttft_s.quantile(0.5) * 1000,
        figures.ttft_s.mean * 1000,
        figures.ttft_s.quantile(0.9) * 1000,
        figures.e2e_s.mean * 1000,
        figures.generated_tokens / (figures.duration_s - first_s),
    )
    return dict(zip(FIGURES, values, strict=True))


async def validate(
    client: AsyncClient,
    config: RachisConfig,
    folder: Path,
    *,
    rounds: int = 3,
    seed: int = 0,
    on_done: Callable[[], None] = lambda: None,
    on_phase: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """client: of a service of 1 + 1 workers with `SETTINGS`. folder: where the measured cost model is put.

    Raises UnavailableError where requests fail.
    """
    # vLLM is imported with it, and takes a while.
    from benchmarks.validation import model as validation_model

    views = await client.workers()
    cluster = Cluster(client, views[0].registration.model.vocabulary_size, seed, on_done)
    on_phase("measuring")
    measured, measured_cores = await _quietest_measurement(cluster)
    file = folder / "measured-costs.json"
    validation_model.write(validation_model.cost_model(measured, config), file)
    comparisons: list[Comparison] = []
    parts: dict[str, dict[str, float]] = {}
    foreign_cores = {"measuring": round(measured_cores, 2)}
    for name, load in LOADS.items():
        on_phase(name)
        runs: list[tuple[float, list[Prompt], list[Timed]]] = []
        for number in range(ATTEMPTS * rounds):
            prompts = prompts_of(load, measured, cluster, random.Random(f"{name}/{seed}/{number}"))
            foreign = ForeignLoad()
            timed = await cluster.run(prompts)
            runs.append((foreign.cores(), prompts, timed))
            if sum(cores <= QUIET_CORES for cores, *_ in runs) >= rounds:
                break
        runs = sorted(runs, key=lambda run: run[0])[:rounds]
        foreign_cores[name] = round(runs[-1][0], 2)
        simulated = [
            predicted(validation_model.simulate(file, measured, config, prompts, timed), _first_s(timed))
            for _, prompts, timed in runs
        ]
        share = f"{load.share:.0%} of the prefill worker" if load.share else "all at once"
        comparisons += compared(name, share, [seen(timed) for *_, timed in runs], simulated, TOLERANCE)
        parts[name] = parts_of(runs[0][2])
    return {
        "measured": measured.as_json(),
        "against": "cpu",
        "hop_s": validation_model.hop_s(measured),
        "rounds": rounds,
        "foreign_cores": foreign_cores,
        "parts_of_the_quietest": parts,
        **tally(comparisons, TOLERANCE),
    }


async def _quietest_measurement(cluster: Cluster) -> tuple[Measured, float]:
    """With the cores that others took meanwhile."""
    tries: list[tuple[float, Measured]] = []
    for _ in range(ATTEMPTS):
        foreign = ForeignLoad()
        measured = await cluster.measure()
        tries.append((foreign.cores(), measured))
        if tries[-1][0] <= QUIET_CORES:
            break
    cores, measured = min(tries, key=lambda each: each[0])
    return measured, cores


def _first_s(timed: Sequence[Timed]) -> float:
    return min(each.sent_s for each in timed)
