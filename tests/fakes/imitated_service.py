"""A made-up service over imitated GPUs, as if it had been measured at no load: what its software takes is known."""

from benchmarks.validation.cluster import PromptPoint
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import StepWork, prefill_work

COSTS = catalog.load("a40-llama-3.1-8b")
MAX_BATCHED_TOKENS = 2048


def point(tokens: int, hop_s: float, pull_s: float, step_start_s: float) -> PromptPoint:
    """Of a prompt of at most two steps."""
    transfer_s = COSTS.network_latency_s + tokens * COSTS.kv_bytes_per_token / COSTS.network_bytes_per_s
    decode_s = COSTS.step_s(StepWork(0, 0.0, 1, tokens + 1, tokens + 1))
    first = min(tokens, MAX_BATCHED_TOKENS)
    prefill_s = step_start_s + COSTS.step_s(prefill_work([(0, first)]))
    if tokens > first:
        prefill_s += COSTS.step_s(prefill_work([(first, tokens - first)]))
    gap_s = 2 * hop_s + transfer_s + pull_s + step_start_s + decode_s
    return PromptPoint(tokens, prefill_s, prefill_s + 2 * hop_s, gap_s)
