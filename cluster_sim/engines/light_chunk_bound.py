"""How long a step of a light engine may last while requests decode, and what it computes of prompts then.

A step stays within `alpha` of the TPOT objective, by what steps cost: so decodes keep their pace whatever prompts come.
The bound yields in one case: a prompt would miss its TTFT objective at that pace, and every request that decodes has
tokens to spare, having been faster than its objective so far. Then a step may use up what the poorest of them has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster_core.chunk_bound import largest_chunk
from cluster_sim.engines.light_request import LightRequest


@dataclass(frozen=True, slots=True)
class ChunkBound:
    """tpot_s, ttft_s: the objectives; without one for TTFT the bound never yields. least_tokens: computed in any step,
    however long the decodes alone take: else prompts would starve beside a large batch."""

    tpot_s: float
    ttft_s: float = math.inf
    alpha: float = 0.95
    least_tokens: int = 128

    @property
    def step_s(self) -> float:
        return self.alpha * self.tpot_s

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
        most_tokens = min(most_tokens, sum(each.known - each.computed for each in prefilling))
        tokens = min(most_tokens, max(self.least_tokens, largest_chunk(step_s, most_tokens, self.step_s)))
        if tokens < most_tokens and self._one_would_be_late(prefilling, tokens, now_s):
            spare_s = min(self._spare_s(each, now_s) for each in decoding)
            if spare_s > self.step_s:
                tokens = max(tokens, largest_chunk(step_s, most_tokens, spare_s))
        return tokens

    def _one_would_be_late(self, prefilling: Sequence[LightRequest], tokens: int, now_s: float) -> bool:
        """Whether so many tokens a step are too few for the first prompt that has not missed its objective yet."""
        before = 0
        for request in prefilling:
            before += request.known - request.computed
            until_s = request.entered_s + self.ttft_s
            if not request.job.pulls and now_s < until_s:
                return now_s + before / tokens * self.step_s > until_s
        return False

    def _spare_s(self, request: LightRequest, now_s: float) -> float:
        """Until its next token is due, by the mean since its first."""
        generated = request.job.output_tokens - request.left
        return request.first_s + generated * self.tpot_s - now_s
