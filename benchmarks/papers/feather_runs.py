"""FEATHER's workload and machine in the simulator: vLLM's own scheduler, and the decode scheduler with its policies,
real ones, under three models of what a batch saves that shares prefixes.

    cache     what is read again in a step comes from the L2 cache as far as it reaches (`cluster_sim.costs.roofline`)
    cascade   the same, and vLLM's former cascade attention: while all running requests share a prefix, and its own
              rule says so, the prefix is read once for all of them, its attention being a product of matrices
    memory    cascade attention, and without it everything is read from device memory for each request anew

No constant is fitted: GPU and models are those of `cluster_sim/cost_models`, the rule is that of vLLM's FlashAttention
backend in 2025. Open loop: Poisson arrivals for some seconds, of which the first third does not count.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster_configs.json_files import read_object
from cluster_sim.costs import cost_files, roofline
from cluster_sim.costs.step_work import CostModel, StepWork
from cluster_sim.engines.engine import OutcomeKind, SimJob

if TYPE_CHECKING:
    from cluster_sim.engines.vllm_engine import VllmSimEngine

LLAMA, LONGCHAT = "Llama 3 8B", "LongChat 13B"
CACHE, CASCADE, MEMORY = LOCALITIES = ("cache", "cascade", "memory")
FCFS, PRODUCTION = "fcfs", "production"

_BLOCK_TOKENS = 16
_MOST_RUNNING, _MOST_BATCHED_TOKENS = 500, 32_768
_WARM_SHARE = 1 / 3
# The paper bounds nobody's wait; production does.
_NO_BOUND_S = 1e6
# LongChat 13B has the shape of every 13B Llama.
_MODELS = {LLAMA: "llama-3.1-8b", LONGCHAT: "llama-2-13b"}


@dataclass(frozen=True, slots=True)
class Load:
    """The paper's default."""

    # Of requests that share a prefix of `shared_tokens`; 0: nobody shares.
    groups: int = 5
    shared_tokens: int = 5000
    # Of each prompt alone; not printed, that of experiment 1.
    own_tokens: int = 20
    decode_tokens: int = 200
    # Arrivals a second.
    rate: float = 100.0
    model: str = LLAMA

    def jobs(self, seconds: float, seed: int) -> Iterator[tuple[float, SimJob]]:
        """(seconds since the start, job), ascending."""
        rng = random.Random(f"feather/{seed}")
        at_s, number = rng.expovariate(self.rate), 0
        blocks, shared = (self.shared_tokens + self.own_tokens) // _BLOCK_TOKENS, self.shared_tokens // _BLOCK_TOKENS
        while at_s < seconds:
            number += 1
            group = rng.randrange(self.groups) if self.groups else None
            # Names of blocks: of a group, and of one request.
            keys = np.arange(blocks, dtype=np.uint64) + np.uint64((1 << 62) + (number << 32))
            if group is not None:
                keys[:shared] = np.arange(shared, dtype=np.uint64) + np.uint64((1 << 61) + (group << 32))
            yield at_s, SimJob(number, self.shared_tokens + self.own_tokens, keys, self.decode_tokens)
            at_s += rng.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class Ran:
    """Figures of one run."""

    tokens_per_s: float
    mean_batch: float
    # Mean time between two tokens of a running request.
    tbt_ms: float


class LocalityCosts:
    """Another cost model, as `cascade` or `memory` have it. common_tokens: asked in each step, what all running
    requests have in common."""

    def __init__(self, base: CostModel, heads: int, kv_heads: int, multiprocessors: int, *, caches_mixed: bool) -> None:
        self._base = base
        self._heads, self._kv_heads, self._multiprocessors = heads, kv_heads, multiprocessors
        self._caches_mixed = caches_mixed
        self.common_tokens: Callable[[], int] = lambda: 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def step_s(self, work: StepWork) -> float:
        requests, common = work.decode_requests, self.common_tokens()
        if self.uses_cascade(requests, common, only_decodes=not work.prefill_tokens):
            # Read once, as one of the distinct tokens.
            context = work.context_tokens - (requests - 1) * common
            work = replace(work, context_tokens=context, prefill_pairs=work.prefill_pairs + requests * common)
        elif not self._caches_mixed:
            work = replace(work, distinct_tokens=work.context_tokens)
        return self._base.step_s(work)

    def uses_cascade(self, requests: int, common_tokens: int, *, only_decodes: bool) -> bool:
        """Enough of both, and fewer rounds over the prefix than with the kernel that splits it, which is for batches
        that only decode, of models whose heads share KV."""
        if common_tokens < 256 or requests < 8:
            return False
        if self._heads == self._kv_heads or not only_decodes:
            return True
        tiles = math.ceil(common_tokens / 128)
        cascade_rounds = math.ceil(self._heads * math.ceil(requests / 128) / self._multiprocessors) * tiles
        split_rounds = math.ceil(requests * self._kv_heads * tiles / self._multiprocessors)
        return cascade_rounds < split_rounds


@cache
def cost_model(model: str, locality: str) -> Any:
    """A `CostModel` of the paper's GPU; one that is a `LocalityCosts` has to be told what is common."""
    path = cost_files.FOLDER / "rtx6000ada-llama-3-8b.json"
    content = {**read_object(path), "model": _MODELS[model]}
    base = roofline.of_content(model, path, content)
    if locality == CACHE:
        return base
    gpu, shape = (cost_files.table(content, key, roofline.QUANTITIES[key], f"{key}s", path) for key in ("gpu", "model"))
    heads, kv_heads, multiprocessors = int(shape["heads"]), int(shape["kv_heads"]), int(gpu["multiprocessors"])
    return LocalityCosts(base, heads, kv_heads, multiprocessors, caches_mixed=locality == CASCADE)


def decode_step_s(locality: str, requests: int, context: int, distinct: int, common: int) -> float:
    """Of one batch of Llama 3 8B without a scheduler; tokens together, counted once, and of the prefix of all."""
    model = cost_model(LLAMA, locality)
    if isinstance(model, LocalityCosts):
        model.common_tokens = lambda: common
    step_s: float = model.step_s(StepWork(decode_requests=requests, context_tokens=context, distinct_tokens=distinct))
    return step_s


def simulate(load: Load, policy: str, locality: str, seconds: float, seed: int = 0) -> Ran:
    """policy: `fcfs`, a stop policy without bound or guard, or PRODUCTION: as workers have it by default."""
    engine = _engine(load.model, policy, locality, seed)
    warm_s = seconds * _WARM_SHARE
    warm, firsts = None, 0
    arrivals = load.jobs(seconds, seed)
    arrival = next(arrivals, None)
    while True:
        arrival_s = arrival[0] if arrival is not None else math.inf
        now_s = min(arrival_s, engine.next_s())
        if now_s >= warm_s and warm is None:
            warm = replace(engine.totals)
        if now_s >= seconds:
            break
        if arrival is not None and arrival_s == now_s:
            engine.add(arrival[1], now_s)
            arrival = next(arrivals, None)
            continue
        outcomes = engine.advance(now_s)
        firsts += sum(each.kind is OutcomeKind.FIRST_TOKEN and each.at_s >= warm_s for each in outcomes)
    totals = engine.totals
    assert warm is not None
    steps, decoded = totals.decode_steps - warm.decode_steps, totals.decode_tokens - warm.decode_tokens
    return Ran(
        (decoded + firsts) / (seconds - warm_s),
        decoded / steps if steps else 0.0,
        (totals.busy_s - warm.busy_s) / steps * 1000 if steps else 0.0,
    )


def _engine(model: str, policy: str, locality: str, seed: int) -> "VllmSimEngine":
    """vLLM is imported here because it takes seconds."""
    from cluster_sim.engines.vllm_engine import VllmSimEngine
    from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings
    from decode_worker.batch_settings import BatchSettings
    from kv_transfer import vllm_private

    costs = cost_model(model, locality)
    settings = VllmEngineSettings(
        kind=SchedulerKind.PLAIN if policy == FCFS else SchedulerKind.DECODE,
        block_tokens=_BLOCK_TOKENS,
        device_blocks=costs.device_tokens // _BLOCK_TOKENS,
        max_running_requests=_MOST_RUNNING,
        max_batched_tokens=_MOST_BATCHED_TOKENS,
        decode=BatchSettings()
        if policy == PRODUCTION
        else BatchSettings(policy=policy, wait_bound_s=_NO_BOUND_S, guard=False),
        tiers=None,
        seed=seed,
    )
    engine = VllmSimEngine(costs, settings)
    scheduler = engine.scheduler

    def common_tokens() -> int:
        """As vLLM counted them: leading blocks of any running request that all running ones hold."""
        running = scheduler.running
        blocks = vllm_private.request_blocks(scheduler, running[0].request_id) if running else []
        return bisect_left(blocks, True, key=lambda block: block.ref_cnt != len(running)) * _BLOCK_TOKENS

    if isinstance(costs, LocalityCosts):
        costs.common_tokens = common_tokens
    return engine
