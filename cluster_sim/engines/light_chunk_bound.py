"""What a light engine computes of prompts beside requests that decode: by the rule of the service's engines.

What it tells the rule (`decode_worker.step_bound`) of: prompts with their deadlines, and steps by its cost model. A
request has all of its blocks from the start, so that no decode takes those that a prompt in its middle needs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster_sim.engines.light_request import LightRequest
from decode_worker.step_bound import ALPHA, PromptWork, StepRoom, bounded_chunk, spare_s

# Of prompts, in any step.
LEAST_TOKENS = 128
# Of the prompts that wait, how many the bound looks at; the service's looks at as many.
SEEN_WAITING = 64


@dataclass(frozen=True, slots=True)
class ChunkBound:
    """tpot_s, ttft_s: the objectives; without one for TTFT the bound does not yield to first tokens. least_tokens:
    computed in any step, as a block of tokens is in the service."""

    tpot_s: float
    ttft_s: float = math.inf
    alpha: float = ALPHA
    least_tokens: int = LEAST_TOKENS

    def tokens(
        self,
        step_s: Callable[[int], float],
        most_tokens: int,
        prefilling: Sequence[LightRequest],
        decoding: Sequence[LightRequest],
        now_s: float,
    ) -> int:
        """Of prompts, in the step that begins now. step_s: of a step with so many. prefilling: in their order."""
        if not decoding:
            return most_tokens
        prompts = [
            PromptWork(each.computed, max(0, each.known - each.computed), self._due_s(each, now_s))
            for each in prefilling
        ]
        room = StepRoom(most_tokens, self.least_tokens)
        # A client that gets its answer after a pull has had its first token before.
        spare = spare_s(
            (each.job.output_tokens - each.left - 1) * self.tpot_s - (now_s - each.first_s) for each in decoding
        )
        return bounded_chunk(prompts, step_s, self.alpha * self.tpot_s, room, spare).tokens

    def _due_s(self, request: LightRequest, now_s: float) -> float:
        """The client of one that is pulled has its first token."""
        return math.inf if request.job.pulls else request.entered_s + self.ttft_s - now_s
