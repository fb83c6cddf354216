"""What the software of a service takes where nothing waits; pure.

Simulator and service have the same cost model: what a request takes beside that, alone in the service, is the
software's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.validation.cluster import PromptPoint
from cluster_sim.costs.step_work import CostModel, StepWork


@dataclass(frozen=True, slots=True)
class Software:
    """Seconds. hop_s: of one message between client, router and worker, with what both ends do for it. pull_s: of a
    pull, beside the transfer: what connector and engine do, and how long it takes them to notice its end."""

    hop_s: float
    pull_s: float


def hop_s_of(points: Sequence[PromptPoint]) -> float:
    """Half of what a first token takes beside the engine."""
    return max(0.0, median(each.ttft_s - each.prefill_s for each in points) / 2)


def software_of(points: Sequence[PromptPoint], costs: CostModel) -> Software:
    """points: of a service whose engines take the time of `costs`."""
    hop_s = hop_s_of(points)
    pulls = [each.gap_s - 2 * hop_s - _second_token_s(each.tokens, costs) for each in points]
    return Software(hop_s, max(0.0, median(pulls)))


def _second_token_s(tokens: int, costs: CostModel) -> float:
    """After the first: the transfer, and a step."""
    transfer_s = costs.network_latency_s + tokens * costs.kv_bytes_per_token / costs.network_bytes_per_s
    return transfer_s + costs.step_s(StepWork(0, 0.0, 1, tokens + 1, tokens + 1))
