"""What happens to a preempted victim's blocks: thrown away and recomputed, or swapped to host memory and back.

Source: Stream2LLM (arXiv:2604.16395), section 4.3. Here both costs are taken for the victim's size, swapping costs the
way out and the way in, the curves are the measured points with straight lines between them, and where host memory has
no room the victim is recomputed (docs/decisions/0015).
"""

from bisect import bisect_left
from enum import Enum
from typing import Literal

from cluster_configs.preemption_costs import CostModel


class Preemption(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


def choose(
    strategy: Literal["recompute", "swap", "cost"],
    victim_tokens: int,
    blocks_needed: int,
    free_host_slots: int,
    model: CostModel,
) -> Preemption:
    """victim_tokens: those whose KV is at stake. blocks_needed: host slots that they would take."""
    if strategy == "recompute" or not 0 < blocks_needed <= free_host_slots:
        return Preemption.RECOMPUTE
    if strategy == "swap" or model.swap_is_cheaper(victim_tokens):
        return Preemption.SWAP
    return Preemption.RECOMPUTE


def crossover_tokens(model: CostModel) -> int | None:
    """The smallest victim from which on swapping is cheaper, as far as was measured; None where the largest is not."""
    above = None
    for size in sorted({*model.recompute.samples, *model.swap_out.samples, *model.swap_in.samples}, reverse=True):
        if not model.swap_is_cheaper(size):
            # Between two points the difference is a straight line: it changes its sign once.
            return above and bisect_left(range(above + 1), True, lo=size, key=model.swap_is_cheaper)
        above = size
    return 1
