"""Does the simulator predict the service? The measurement behind `rachis bench simulator`.

The service is the real one over imitated GPUs, which take the time of a cost model and compute nothing; the simulator
has the same cost model. So what differs is software: hops, batching, polling, the order in which things are noticed.

What software takes is measured at no load (`software`), and nothing else is told to the simulator but the service's own
configuration and when each request was really sent. The simulated figure is the median of runs that differ in the
seed of placement alone: their range says how much of a figure is chance.

Imitated GPUs of a slow kind are taken, so that the machine's two cores are not the bottleneck: with
`a40-llama-3.1-8b` a step takes 28 ms or more, and what the engine's process does for it 1 to 2 ms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rachis import AsyncClient

from benchmarks.quiet import ForeignLoad
from benchmarks.validation.cluster import Cluster, Prompt, Timed
from benchmarks.validation.comparison import (
    Comparison,
    compared,
    figures_of,
    figures_of_simulation,
    tally,
)
from benchmarks.validation.loads import LOADS, WORKLOADS, drawn, prompts_of
from benchmarks.validation.software import Software, scenario_of, software_of, workers_of
from cluster_configs.schema import RachisConfig
from cluster_core.errors import ConfigError
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import CostModel
from cluster_sim.reports.figures import Figures, Histogram
from cluster_sim.scenario import make_world
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
# Simulated runs of each measured one.
SIMULATED_RUNS = 3


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
    software: Software
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
    on_phase: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """client: of a service with that configuration. seconds: in which the requests of a run arrive.

    Raises UnavailableError where requests fail, ConfigError where the service imitates nothing.
    """
    costs = costs_of(config)
    views = await client.workers()
    vocabulary_size = views[0].registration.model.vocabulary_size
    cluster = Cluster(client, vocabulary_size, seed, lambda: None)
    on_phase("at no load")
    await cluster.warm_up()
    software = software_of(await cluster.prompt_points(), costs)
    runs = []
    block_tokens, workers = config.engine.block_size_tokens, workers_of(config)
    for workload in workloads:
        for load in loads:
            for number in range(rounds):
                on_phase(f"{workload}, {load} load")
                run_seed = seed + number
                requests = drawn(WORKLOADS[workload], LOADS[load], seconds, costs, workers, block_tokens, run_seed)
                prompts = prompts_of(requests, block_tokens, vocabulary_size, run_seed)
                runs.append(await _replayed(cluster, workload, load, requests, prompts, number))
    return Measurement(software, runs)


def costs_of(config: RachisConfig) -> CostModel:
    if config.engine.cost_model is None:
        raise ConfigError("must be imitated: the simulator has the cost model of the service", field="engine.device")
    return catalog.load(config.engine.cost_model)


async def _replayed(
    cluster: Cluster, workload: str, load: str, requests: list[SimRequest], prompts: list[Prompt], number: int
) -> Replayed:
    foreign = ForeignLoad()
    timed = await cluster.run(prompts, f"{workload}/{load}/{number}")
    return Replayed(workload, load, requests, timed, foreign.cores())


def simulate(config: RachisConfig, software: Software, run: Replayed, seed: int) -> Figures:
    """The same requests, at the times at which they were really sent."""
    scenario = scenario_of(config, costs_of(config), software, seed)
    world = make_world(scenario, block_tokens=config.engine.block_size_tokens)
    sent = [replace(request, arrival_s=timed.arrived_s) for request, timed in zip(run.requests, run.timed, strict=True)]
    figures = world.run(sorted(sent, key=lambda each: each.arrival_s))
    world.check_invariants()
    return figures


def seen(timed: Sequence[Timed]) -> dict[str, float]:
    """Of one run of the service."""
    ttft_s, tpot_s = Histogram(), Histogram()
    for each in timed:
        ttft_s.add(each.ttft_s)
        if len(each.token_s) > 1:
            tpot_s.add((each.end_s - each.token_s[0]) / (len(each.token_s) - 1))
    return figures_of(
        ttft_s,
        tpot_s,
        sum(len(each.token_s) for each in timed),
        max(each.end_s for each in timed) - _first_s(timed),
        sum(each.cached_tokens for each in timed) / sum(each.prompt_tokens for each in timed),
    )


def judged(
    config: RachisConfig, measurement: Measurement, on_phase: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """What is simulated beside what was measured."""
    comparisons: list[Comparison] = []
    runs: dict[tuple[str, str], list[Replayed]] = {}
    for run in measurement.runs:
        runs.setdefault((run.workload, run.load), []).append(run)
    for (workload, load), rounds in runs.items():
        on_phase(f"simulating {workload}, {load} load")
        simulated = [
            figures_of_simulation(simulate(config, measurement.software, run, seed), _first_s(run.timed))
            for run in rounds
            for seed in range(SIMULATED_RUNS)
        ]
        comparisons += compared(workload, load, [seen(run.timed) for run in rounds], simulated, TOLERANCE)
    return {
        "against": "imitated",
        "cost_model": config.engine.cost_model,
        "workers": workers_of(config),
        "software": {
            "hop_ms": round(measurement.software.hop_s * 1000, 3),
            "pull_ms": round(measurement.software.pull_s * 1000, 3),
        },
        "runs": [
            {
                "workload": run.workload,
                "load": run.load,
                "requests": len(run.requests),
                "foreign_cores": round(run.foreign_cores, 2),
            }
            for run in measurement.runs
        ],
        **tally(comparisons, TOLERANCE),
    }


def _first_s(timed: Sequence[Timed]) -> float:
    return min(each.arrived_s for each in timed)
