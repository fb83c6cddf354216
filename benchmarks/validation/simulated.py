"""The simulated counterpart of an imitated service: its scenario, and its life through all runs, one after the other.

The scenario has the service's own configuration, and nothing in it comes from the workloads that are compared. One
world lives through what the service lived through, from its first prompt at no load: what router and workers have
learned and cached by a run is the same on both sides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from benchmarks.validation.cluster import PROMPT_SIZES, REPETITIONS, WARM_UP, WARM_UP_TOKENS
from benchmarks.validation.comparison import figures_of
from benchmarks.validation.software import Software
from cluster_configs.schema import RachisConfig
from cluster_core.errors import ConfigError
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import CostModel
from cluster_sim.reports.figures import Histogram
from cluster_sim.scenario import PoolSection, PoolsSection, RouterSection, Scenario, make_world
from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.world import World
from worker_runtime.registration import RENEWALS_PER_LEASE

# Of a scenario.
EngineKind = Literal["light", "vllm"]

# Between the prompts at no load, which are sent one by one.
_ALONE_S = 2.0
_ALONE_TOKENS = 8
# Of a run that ends later than the real one, the next one knows nothing.
_PAUSE_S = 30.0


def costs_of(config: RachisConfig) -> CostModel:
    """Raises ConfigError where nothing is imitated."""
    if config.engine.cost_model is None:
        raise ConfigError("must be imitated: the simulator has the cost model of the service", field="engine.device")
    return catalog.load(config.engine.cost_model)


def workers_of(config: RachisConfig) -> dict[str, int]:
    return {"prefill": config.pools.prefill.workers, "decode": config.pools.decode.workers}


def scenario_of(config: RachisConfig, software: Software, seed: int = 0, engine_kind: EngineKind = "vllm") -> Scenario:
    """seed: of placement, which chooses between equals."""
    engine, router, costs = config.engine, config.router, costs_of(config)
    device_tokens = costs.device_tokens if engine.kv_blocks is None else engine.kv_blocks * engine.block_size_tokens
    if config.tiers.host_ratio is not None:
        host_tokens = int(device_tokens * config.tiers.host_ratio)
    else:
        host_tokens = int(config.tiers.host_gib * 2**30) // costs.kv_bytes_per_token
    pools = {
        name: PoolSection(
            workers=workers,
            max_running_requests=engine.max_running_requests,
            max_batched_tokens=engine.max_batched_tokens,
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            step_start_ms=software.step_start_s * 1000,
        )
        for name, workers in workers_of(config).items()
    }
    return Scenario(
        cost_model=engine.cost_model or costs.name,
        engine=engine_kind,
        pools=PoolsSection(**pools),
        placement=config.placement.model_copy(update={"seed": seed}),
        tiers=config.tiers,
        streaming=config.streaming,
        decode=config.decode,
        router=RouterSection(
            hop_ms=software.hop_s * 1000,
            pull_ms=software.pull_s * 1000,
            prefill_attempts=router.prefill_attempts,
            request_timeout_s=router.request_timeout_s,
            handoff_deadline_s=config.handoff.deadline_s,
            # Workers write when so much time has passed, routers read it at any time of theirs.
            event_delay_ms=(config.index.write_interval_s + config.index.refresh_s / 2) * 1000,
            report_s=config.redis.worker_lease_s / RENEWALS_PER_LEASE,
            worker_lease_s=config.redis.worker_lease_s,
        ),
    )


def simulated(
    config: RachisConfig,
    software: Software,
    runs: Sequence[Sequence[SimRequest]],
    seed: int,
    engine_kind: EngineKind = "vllm",
) -> list[dict[str, float]]:
    """The figures of each run. runs: requests at the times at which they were really sent, since their run began."""
    block_tokens = config.engine.block_size_tokens
    world = make_world(scenario_of(config, software, seed, engine_kind), block_tokens=block_tokens)
    whole = [_at_no_load(block_tokens), *runs]
    meter = _Meter(world, [len(run) for run in whole])
    world.run(_one_after_the_other(whole, meter), meter.ended)
    world.check_invariants()
    return meter.figures[1:]


def _at_no_load(block_tokens: int) -> list[SimRequest]:
    """The prompts that the service was measured with."""
    sizes = [WARM_UP_TOKENS] * WARM_UP + [*PROMPT_SIZES] * REPETITIONS
    requests = []
    for number, (size, before) in enumerate(zip(sizes, accumulate(sizes, initial=0), strict=False)):
        blocks = np.arange(size // block_tokens, dtype=np.uint64) + np.uint64(before)
        requests.append(SimRequest(number * _ALONE_S, size, _ALONE_TOKENS, block_names(blocks)))
    return requests


def _one_after_the_other(runs: Sequence[Sequence[SimRequest]], meter: "_Meter") -> Iterator[SimRequest]:
    """By arrival, each run after a pause."""
    began_s = 0.0
    for run in runs:
        ordered = sorted(run, key=lambda each: each.arrival_s)
        meter.began_s.append(began_s + ordered[0].arrival_s)
        for each in ordered:
            yield replace(each, arrival_s=began_s + each.arrival_s)
        began_s += max(each.complete_s for each in run) + _PAUSE_S


@dataclass(slots=True)
class _Totals:
    """Since the world began."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0


class _Meter:
    """Takes the figures of a world run by run. requests: of each run."""

    def __init__(self, world: World, requests: Sequence[int]) -> None:
        self.figures: list[dict[str, float]] = []
        # Of each run, its first request.
        self.began_s: list[float] = []
        self._world = world
        self._ends = list(accumulate(requests))
        self._ended = 0
        self._before = _Totals()

    def ended(self, number: int) -> None:
        """So many requests more have their outcome."""
        self._ended += number
        if self._ended >= self._ends[len(self.figures)]:
            self._take()

    def _take(self) -> None:
        figures, before = self._world.figures, self._before
        totals = [each for worker in self._world.workers.values() for each in worker.totals()]
        now = self._before = _Totals(
            figures.prompt_tokens,
            sum(each.device_hit_tokens + each.host_hit_tokens for each in totals),
            figures.generated_tokens,
        )
        self.figures.append(
            figures_of(
                figures.ttft_s,
                figures.tpot_s,
                now.generated_tokens - before.generated_tokens,
                figures.duration_s - self.began_s[len(self.figures)],
                (now.hit_tokens - before.hit_tokens) / (now.prompt_tokens - before.prompt_tokens),
            )
        )
        figures.ttft_s, figures.tpot_s = Histogram(), Histogram()
