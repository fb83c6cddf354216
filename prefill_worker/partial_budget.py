"""How much a step computes of sessions that still take input. Pure.

Whose prompt becomes whole while such a step runs waits for the rest of it: where `whole_per_s` of them come, a step of
s seconds costs them whole_per_s * s * s / 2 seconds in all. It brings what each of its tokens takes times the chance
that the token stays. A step also takes what any step costs, which brings nothing.

While there is nothing else to do one such step follows another, so what counts is what they bring a second, less what
they cost: a token more is computed while that rises. With tokens that are all as likely to stay the step is as long as
the square root of 2 * survival * fixed_s / whole_per_s, as the size of an order is in stocks (Harris, 1913). A step
that would cost more than it brings is not taken, and nobody is computed until there is more to be had. What stays for
sure is bounded by `tokens` alone: it is work that has to be done, and smaller steps only make more of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from prefill_worker.policies import Contender
from prefill_worker.survival import Slice

# Over how long prompts that became whole are counted, and how long before the first one counting began.
RATE_S = 20.0
_BEFORE_S = 1.0
# While all that could be computed is held back, it is looked at so often whether it still is.
HELD_NAP_S = 0.02


class WholePrompts:
    """How many prompts become whole in a second, of late: requests that come, and sessions whose input is closed."""

    def __init__(self) -> None:
        self._began_s = inf
        # As it was when the last one came.
        self._sum = 0.0
        self._last_s = 0.0

    def came(self, now_s: float) -> None:
        self._began_s = min(self._began_s, now_s - _BEFORE_S)
        self._sum = self._sum * exp((self._last_s - now_s) / RATE_S) + 1.0
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Of as much time as there was."""
        if self._began_s == inf:
            return 0.0
        seen_s = RATE_S * (1.0 - exp((self._began_s - now_s) / RATE_S))
        return self._sum * exp((self._last_s - now_s) / RATE_S) / seen_s


@dataclass(slots=True)
class PartialBudget:
    """Of one step; told of what is granted, in order. Costs are in tokens: what the engine computes meanwhile.

    tokens: of all such sessions together, at most. slices: of one name so many tokens from the first one on, by how
    likely they stay. price: `whole_per_s` / tokens a second. fixed_tokens: what any step costs. overdue_since_s: who
    has waited since then is computed as if it stayed for sure, so that nobody is held for ever.
    """

    tokens: float
    slices: Callable[[str, int, int], Sequence[Slice]]
    price: float = 0.0
    fixed_tokens: float = 0.0
    overdue_since_s: float = -inf
    _taken: int = 0
    # Of those that were taken, how many are expected to stay.
    _kept: float = 0.0

    def most_tokens(self, each: Contender) -> int:
        """What the step may compute of it after what was granted so far."""
        end, kept, sure_end = float(self._taken), self._kept, float(self._taken)
        is_sure = True
        for tokens, survival in self._slices(each, each.remaining_tokens):
            more = min(tokens, min(self.tokens, self._best_end(end, kept, survival)) - end)
            if more <= 0:
                break
            end += more
            kept += survival * more
            is_sure = is_sure and survival >= 1
            sure_end = end if is_sure else sure_end
        costs = self.price * (self.fixed_tokens + end) ** 2 / 2 if kept < end else 0.0
        return int(end if kept >= costs else sure_end) - self._taken

    def granted(self, each: Contender, tokens: int) -> None:
        """Nothing is computed beside a prompt that is whole."""
        if each.complete:
            self.tokens = 0.0
            return
        self._taken += tokens
        self._kept += sum(survival * count for count, survival in self._slices(each, tokens))

    def _slices(self, each: Contender, tokens: int) -> Sequence[Slice]:
        if each.waiting_since_s <= self.overdue_since_s:
            return (Slice(tokens, 1.0),)
        return self.slices(each.request_id, each.known_tokens - each.remaining_tokens, tokens)

    def _best_end(self, taken: float, kept: float, survival: float) -> float:
        """How many tokens a step has that brings most, where `kept` of `taken` are expected to stay and the rest is as
        likely to."""
        if not self.price or survival >= 1:
            return inf
        gone = survival * (self.fixed_tokens + taken) - kept
        return sqrt(2 * gone / self.price) - self.fixed_tokens if gone > 0 else 0.0
