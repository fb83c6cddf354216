"""How fast the engine computes prompts, in tokens a second: what waiting is worth, and how much a short step has. Pure.

A step with few tokens says more of what any step costs than of the engine's speed, so the fastest of late counts. One
step alone says nothing, though: seen by a host that is late, it may seem to be over at once. Steps are measured
together until they have taken `MEASURED_S`, with what lies between them.
"""

import math

from prefill_worker.step_limit import StepLimit

# Of the engine's speed, that a prompt earns while it waits.
AGEING = 0.5
# What a step computes that is to be short, but for what any step costs.
SHORT_STEP_S = 0.05
# Steps are measured together until they have taken so long.
MEASURED_S = 0.05
# What is left of the fastest with each slower measurement of longer steps: about the last thousand count.
_KEEP = 0.999


class StepSpeed:
    """Told of steps by whoever takes them; several may be under way, and end in order."""

    def __init__(self) -> None:
        # 0 before the first measurement.
        self.tokens_per_s = 0.0
        # (step, when it began, its tokens).
        self._under_way: list[tuple[object, float, int]] = []
        self._ended_s = -math.inf
        # Of the steps that are measured together: what they took, their tokens, and those of the smallest.
        self._took_s = 0.0
        self._tokens = 0
        self._steps = 0
        self._fewest: float = math.inf
        self._limit = StepLimit()

    @property
    def short_step_tokens(self) -> float:
        """Any number before the speed is known."""
        return self.tokens_per_s * SHORT_STEP_S or math.inf

    @property
    def turn_step_tokens(self) -> float:
        """While several tenants or priorities take turns; likewise."""
        return self._limit.tokens

    @property
    def fixed_tokens(self) -> float:
        """What any step costs, by what is computed meanwhile; 0 where it is not known."""
        return self.tokens_per_s * self._limit.fixed_s

    def left_tokens(self, remaining_tokens: int, waited_s: float) -> float:
        """What is left of a prompt, less what its wait has earned: `AGEING` of what the engine computes meanwhile. By
        the wait alone before the speed is known."""
        if not self.tokens_per_s:
            return -waited_s
        return remaining_tokens - AGEING * self.tokens_per_s * waited_s

    def began(self, step: object, tokens: int, now_s: float) -> None:
        """step: what `ended` will be told of."""
        if tokens:
            self._under_way.append((step, now_s, tokens))

    def ended(self, step: object, now_s: float) -> None:
        """Steps that it was not told of are ignored."""
        if not any(each is step for each, _, _ in self._under_way):
            return
        while self._under_way:
            each, began_s, tokens = self._under_way.pop(0)
            if each is step:
                # After a longer pause there was nothing to compute; else the host was late to hear of its beginning.
                goes_on = began_s - self._ended_s < MEASURED_S
                self._took(tokens, now_s - (self._ended_s if goes_on else began_s))
                self._ended_s = now_s
                return

    def _took(self, tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        self._took_s += seconds
        self._tokens += tokens
        self._steps += 1
        self._fewest = min(self._fewest, tokens)
        if self._took_s >= MEASURED_S:
            self._limit.measured(self._tokens / self._steps, self._took_s / self._steps)
            self._found(self._fewest, self._tokens / self._took_s)
            self._took_s, self._tokens, self._steps, self._fewest = 0.0, 0, 0, math.inf

    def _found(self, fewest_tokens: float, tokens_per_s: float) -> None:
        """Short steps make nothing slower: the next ones would be shorter still, and slower for that. But no engine is
        faster than its tokens alone: what has become slower is found in short steps, too."""
        if tokens_per_s > self.tokens_per_s:
            self.tokens_per_s = tokens_per_s
        elif self.tokens_per_s > self._limit.most_per_s:
            self.tokens_per_s = max(self.tokens_per_s * _KEEP, self._limit.most_per_s)
        elif fewest_tokens > self.short_step_tokens:
            self.tokens_per_s = max(self.tokens_per_s * _KEEP, tokens_per_s)
