"""Does the simulator predict the service? The measurement behind `rachis bench simulator`.

The service is the real one over imitated GPUs, which take the time of a cost model and compute nothing; the simulator
has the same cost model. So what differs is software: hops, batching, polling, the order in which things are noticed.

What software takes is measured at no load (`software`), and nothing else is told to the simulator but the service's own
configuration and when each request was really sent. The simulated figure is the median of runs that differ in the
seed of placement alone: their range says how much of a figure is chance.

Imitated GPUs of a slow kind are taken, so that the machine's two cores are not the bottleneck: with
`a40-llama-3.1-8b` a step takes 28 ms or more, and what the engine's process does for it 1 to 2 ms.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rachis import AsyncClient

from benchmarks.quiet import ForeignLoad
from benchmarks.validation.cluster import REPETITIONS, Cluster, PromptPoint, Timed
from benchmarks.validation.comparison import Comparison, compared, figures_of, tally
from benchmarks.validation.loads import LOADS, WORKLOADS, drawn, prompts_of
from benchmarks.validation.simulated import EngineKind, costs_of, simulated, workers_of
from benchmarks.validation.software import software_of
from cluster_configs.schema import RachisConfig
from cluster_sim.reports.figures import Histogram
from cluster_sim.workloads.requests import SimRequest

TOLERANCE = 0.1
# What the service is started with, where nothing else is asked for.
SETTINGS: Mapping[str, Any] = {
    "model.name": "imitated-llama-3.1-8b",
    "engine.device": "imitated",
    "engine.cost_model": "a40-llama-3.1-8b",
    "engine.kv_blocks": None,
    "engine.max_model_len": 32_768,
    "engine.max_running_requests": 256,
    "engine.max_batched_tokens": 2048,
    "pools.prefill.workers": 2,
    "pools.prefill.cpus_per_worker": 0.1,
    "pools.decode.workers": 2,
    "pools.decode.cpus_per_worker": 0.1,
    "router.max_in_flight_requests": 4096,
    "gateway.port": None,
    "tiers.host_gib": 16,
    "placement.disaggregation": "always",
    # Not simulated: copies of hot prefixes, and chunks of several blocks.
    "placement.replication": False,
    "index.chunk_tokens": 32,
}
# Simulated lives of each measured one.
SIMULATED_LIVES = 3


@dataclass(frozen=True, slots=True)
class Replayed:
    """One workload at one load, as it was measured."""

    workload: str
    load: str
    requests: list[SimRequest]
    timed: list[Timed]
    # Taken by other processes meanwhile.
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """points: at no load. runs: in the order in which the service had them."""

    points: list[PromptPoint]
    runs: list[Replayed]


async def measure(
    client: AsyncClient,
    config: RachisConfig,
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    loads: Sequence[str] = tuple(LOADS),
    seconds: float = 45.0,
    rounds: int = 1,
    seed: int = 0,
    repetitions: int = REPETITIONS,
    on_phase: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """client: of a service with that configuration. seconds: in which the requests of a run arrive. repetitions: of
    each prompt at no load.

    Raises UnavailableError where requests fail, ConfigError where the service imitates nothing.
    """
    costs, workers, block_tokens = costs_of(config), workers_of(config), config.engine.block_size_tokens
    views = await client.workers()
    vocabulary_size = views[0].registration.model.vocabulary_size
    cluster = Cluster(client, vocabulary_size, seed, lambda: None)
    on_phase("at no load")
    await cluster.warm_up()
    points = await cluster.prompt_points(repetitions)
    runs = []
    for workload, load, number in ((w, each, n) for w in workloads for each in loads for n in range(rounds)):
        on_phase(f"{workload}, {load} load")
        run_seed = random.Random(f"{workload}/{load}/{seed}/{number}").getrandbits(32)
        requests = drawn(WORKLOADS[workload], LOADS[load], seconds, costs, workers, block_tokens, run_seed)
        prompts = prompts_of(requests, block_tokens, vocabulary_size, run_seed)
        foreign = ForeignLoad()
        timed = await cluster.run(prompts)
        runs.append(Replayed(workload, load, requests, timed, foreign.cores()))
    return Measurement(points, runs)


def seen(timed: Sequence[Timed]) -> dict[str, float]:
    """The figures of one run of the service."""
    ttft_s, tpot_s = Histogram(), Histogram()
    for each in timed:
        ttft_s.add(each.ttft_s)
        if len(each.token_s) > 1:
            tpot_s.add((each.end_s - each.token_s[0]) / (len(each.token_s) - 1))
    return figures_of(
        ttft_s,
        tpot_s,
        sum(len(each.token_s) for each in timed),
        max(each.end_s for each in timed) - min(each.arrived_s for each in timed),
        sum(each.cached_tokens for each in timed) / sum(each.prompt_tokens for each in timed),
    )


def judged(
    config: RachisConfig,
    measurement: Measurement,
    engine_kind: EngineKind = "vllm",
    on_phase: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What is simulated beside what was measured. engine_kind: of the scenario."""
    runs = measurement.runs
    software = software_of(measurement.points, costs_of(config), config.engine.max_batched_tokens)
    sent = [
        [replace(request, arrival_s=timed.arrived_s) for request, timed in zip(run.requests, run.timed, strict=True)]
        for run in runs
    ]
    lives = []
    for seed in range(SIMULATED_LIVES):
        on_phase(f"simulating, {seed + 1} of {SIMULATED_LIVES}")
        lives.append(simulated(config, software, sent, seed, engine_kind))
    comparisons: list[Comparison] = []
    for workload, load in dict.fromkeys((run.workload, run.load) for run in runs):
        places = [place for place, run in enumerate(runs) if (run.workload, run.load) == (workload, load)]
        measured = [seen(runs[place].timed) for place in places]
        predicted = [life[place] for life in lives for place in places]
        comparisons += compared(workload, load, measured, predicted, TOLERANCE)
    return {
        "against": "imitated",
        "engine": engine_kind,
        "cost_model": config.engine.cost_model,
        "workers": workers_of(config),
        "software": software.as_json(),
        "runs": [
            {
                "workload": run.workload,
                "load": run.load,
                "requests": len(run.requests),
                "foreign_cores": round(run.foreign_cores, 2),
            }
            for run in runs
        ],
        **tally(comparisons, TOLERANCE),
    }
