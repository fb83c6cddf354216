"""What the software of a service takes where nothing waits; pure.

Simulator and service have the same cost model: what a request takes beside that, alone in the service, is the
software's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.validation.cluster import PromptPoint
from cluster_sim.costs.step_work import CostModel, StepWork, prefill_work


@dataclass(frozen=True, slots=True)
class Software:
    """Seconds."""

    # Of one message between client, router and worker, with what both ends do for it.
    hop_s: float
    # Of a pull, beside the transfer: what connector and engine do, and how long it takes them to notice its end.
    pull_s: float
    # Of a step that goes on with no request of the step before, beside the cost model: nothing hides what the engine
    # does for it.
    step_start_s: float

    def as_json(self) -> dict[str, float]:
        return {
            "hop_ms": round(self.hop_s * 1000, 3),
            "pull_ms": round(self.pull_s * 1000, 3),
            "step_start_ms": round(self.step_start_s * 1000, 3),
        }


def hop_s_of(points: Sequence[PromptPoint]) -> float:
    """Half of what a first token takes beside the engine."""
    return max(0.0, median(each.ttft_s - each.prefill_s for each in points) / 2)


def software_of(points: Sequence[PromptPoint], costs: CostModel, max_batched_tokens: int) -> Software:
    """points: of a service whose engines take the time of `costs`, in steps of so many tokens at most."""
    hop_s = hop_s_of(points)
    start_s = max(0.0, median(each.prefill_s - _prefill_s(each.tokens, costs, max_batched_tokens) for each in points))
    pull_s = median(each.gap_s - 2 * hop_s - start_s - _second_token_s(each.tokens, costs) for each in points)
    return Software(hop_s, max(0.0, pull_s), start_s)


def _prefill_s(tokens: int, costs: CostModel, max_batched_tokens: int) -> float:
    """Alone, chunk by chunk."""
    chunks = [(start, min(max_batched_tokens, tokens - start)) for start in range(0, tokens, max_batched_tokens)]
    return sum(costs.step_s(prefill_work([chunk])) for chunk in chunks)


def _second_token_s(tokens: int, costs: CostModel) -> float:
    """After the first: the transfer, and a step."""
    transfer_s = costs.network_latency_s + tokens * costs.kv_bytes_per_token / costs.network_bytes_per_s
    return transfer_s + costs.step_s(StepWork(0, 0.0, 1, tokens + 1, tokens + 1))
