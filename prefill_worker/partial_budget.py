"""How much a step computes of sessions that still take input. Pure.

Who ends a version of a prompt while such a step runs waits for the rest of it. Where `ends_per_s` of them come, a step
of s seconds costs them ends_per_s * s * s / 2 seconds in all, and a token more what it takes times ends_per_s * s. It
brings what it takes times the chance that it stays, and is computed while that is more. What stays for sure is bounded
by `tokens` alone, as everything is before the engine's speed is known; a block is always computed, so that nobody who
has a turn is held.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from prefill_worker.policies import Contender
from prefill_worker.survival import Slice


@dataclass(slots=True)
class PartialBudget:
    """Of one step; told of what is granted, in order."""

    # Of all such sessions together.
    tokens: float
    # Of one name: so many tokens from the first one on, by how likely they stay.
    slices: Callable[[str, int, int], Sequence[Slice]]
    # What has to be likely to stay of a token, for each that the step has before it: `ends_per_s` / tokens a second.
    price: float = 0.0
    least_tokens: int = 1
    _taken: int = 0

    def most_tokens(self, each: Contender) -> int:
        """What the step may compute of it after what was granted so far."""
        end = self._taken
        for tokens, survival in self.slices(
            each.request_id, each.known_tokens - each.remaining_tokens, each.remaining_tokens
        ):
            worth = survival / self.price if self.price and survival < 1 else inf
            most = min(self.tokens, max(worth, self.least_tokens))
            if end + tokens > most:
                return int(max(end, most)) - self._taken
            end += tokens
        return end - self._taken

    def granted(self, each: Contender, tokens: int) -> None:
        """Nothing is computed beside a prompt that is whole."""
        if each.complete:
            self.tokens = 0.0
        else:
            self._taken += tokens
