"""The simulated counterpart of a measured cluster: a cost model, and a world that replays what arrived.

Where the figures of `Measured` go: engine times of prompts into the prefill curve; steps of whole batches into decode;
half of what a first token takes beside the engine into each hop; the rest of the gap before the second token, by a line
over the prompt's tokens, into latency and bandwidth of the pull. All workers share the processors of one machine: a
step that begins while the other pool is at work takes as many times longer as was measured with both busy.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.validation.cluster import Measured, Prompt, Timed
from benchmarks.validation.software import hop_s_of
from cluster_configs.preemption_costs import RECOMPUTE_KEY, SWAP_IN_KEY, SWAP_OUT_KEY, default_model
from cluster_configs.schema import RachisConfig
from cluster_sim.costs import catalog
from cluster_sim.costs.measured import DecodeStep, MeasuredDecode
from cluster_sim.costs.step_work import CostModel, StepWork
from cluster_sim.dispatch_settings import DispatchSettings
from cluster_sim.reports.figures import Figures
from cluster_sim.worker import PoolSettings
from cluster_sim.workloads.requests import SimRequest
from cluster_sim.world import World, WorldSettings
from kv_transfer.claims.prefix_chunks import chunk_keys
from kv_transfer.tiers.settings import TierSettings

# Of the built-in model in fp32. The bandwidth is fitted in tokens: nothing else depends on it.
KV_BYTES_PER_TOKEN = 4096
# Where the line over tokens has no slope, noise has won.
_LEAST_S_PER_TOKEN = 1e-7
_FIT = "fit to the cluster measured in this run"


def hop_s(measured: Measured) -> float:
    """One message between client, router and worker, with what both ends do for it."""
    return hop_s_of(measured.prompts)


def cost_model(measured: Measured, config: RachisConfig) -> dict[str, Any]:
    """The content of a cost model file of kind `measured`."""
    steps = [DecodeStep(each.batch, each.context_tokens, each.context_tokens, each.step_s) for each in measured.batches]
    decode = MeasuredDecode(steps)
    tokens = np.array([each.tokens for each in measured.prompts], dtype=np.float64)
    pulls = np.array([each.gap_s - decode.seconds(1, each.tokens, each.tokens) for each in measured.prompts])
    slope, latency = (float(each) for each in np.polyfit(tokens, pulls - 2 * hop_s(measured), 1))
    swap = default_model("cpu")
    blocks = config.engine.kv_blocks or 1
    host_tokens = int(config.tiers.host_gib * 2**30) // KV_BYTES_PER_TOKEN
    return {
        "kind": "measured",
        "profile": {
            RECOMPUTE_KEY: {str(each.tokens): [each.prefill_s * 1000] for each in measured.prompts},
            SWAP_OUT_KEY: {str(each): list(ms) for each, ms in swap.swap_out.samples.items()},
            SWAP_IN_KEY: {str(each): list(ms) for each, ms in swap.swap_in.samples.items()},
        },
        "decode": {
            "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
            "points": [
                {
                    "batch": each.batch,
                    "total_tokens": each.context_tokens,
                    "distinct_tokens": each.distinct_tokens,
                    "step_ms": each.step_s * 1000,
                }
                for each in steps
            ],
        },
        "gpus": _number(1, "GPUs"),
        "dollars_per_hour": _number(0, "$/h"),
        "device_tokens": _number(blocks * config.engine.block_size_tokens, "tokens"),
        "host_tokens": _number(host_tokens, "tokens"),
        "network_bytes_per_s": _number(KV_BYTES_PER_TOKEN / max(slope, _LEAST_S_PER_TOKEN), "bytes/s"),
        "network_latency_s": _number(max(0.0, latency), "s"),
    }


def _number(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": _FIT}


class SharedCores:
    """Engines on the processors of one machine. now_s: of the world that they are in."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = lambda: 0.0
        self._busy_until_s: dict[str, float] = {}

    def is_other_busy(self, pool: str) -> bool:
        now_s = self.now_s()
        return any(until_s > now_s for other, until_s in self._busy_until_s.items() if other != pool)

    def works(self, pool: str, seconds: float) -> None:
        self._busy_until_s[pool] = self.now_s() + seconds


class SharedCosts:
    """`step_work.CostModel` of a worker that shares the machine: asked for a step when it begins."""

    def __init__(self, base: CostModel, pool: str, slowdown: float, cores: SharedCores) -> None:
        self._base = base
        self._pool = pool
        self._slowdown = slowdown
        self._cores = cores

    def step_s(self, work: StepWork) -> float:
        seconds = self._base.step_s(work)
        if self._cores.is_other_busy(self._pool):
            seconds *= self._slowdown
        self._cores.works(self._pool, seconds)
        return seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def simulate(
    model_file: Path, measured: Measured, config: RachisConfig, prompts: Sequence[Prompt], timed: Sequence[Timed]
) -> Figures:
    """The same prompts, at the times at which they were really sent."""
    from cluster_sim.engines.vllm_engine import VllmSimEngine
    from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings

    base, cores = catalog.load(str(model_file)), SharedCores()
    slowdowns = {"prefill": measured.prefill_slowdown, "decode": measured.decode_slowdown}
    kinds = {"prefill": SchedulerKind.STREAMING, "decode": SchedulerKind.DECODE}
    block_tokens = config.engine.block_size_tokens
    pools = {}
    for pool, kind in kinds.items():
        shared: CostModel = SharedCosts(base, pool, slowdowns[pool], cores)
        settings = VllmEngineSettings(
            kind=kind,
            block_tokens=block_tokens,
            device_blocks=base.device_tokens // block_tokens,
            host_blocks=base.host_tokens // block_tokens,
            max_running_requests=config.engine.max_running_requests,
            max_batched_tokens=config.engine.max_batched_tokens,
            max_model_tokens=config.engine.max_model_len,
            tiers=TierSettings(),
            leaps=False,
        )
        pools[pool] = PoolSettings(
            1, shared, partial(VllmSimEngine, shared, settings), config.engine.max_running_requests
        )
    dispatch = DispatchSettings(hop_s=hop_s(measured))
    world = World("validation", WorldSettings(pools, block_tokens, config.placement, dispatch))
    cores.now_s = lambda: world.events.now_s
    order = sorted(zip(prompts, timed, strict=True), key=lambda pair: pair[1].sent_s)
    figures = world.run(
        SimRequest(
            seen.sent_s,
            len(prompt.token_ids),
            prompt.output_tokens,
            chunk_keys(np.array(prompt.token_ids, dtype=np.uint32), 1, block_tokens),
        )
        for prompt, seen in order
    )
    world.check_invariants()
    return figures


def write(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
