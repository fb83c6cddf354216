"""How many tokens a step has while tenants take turns: what the engine computes in `TURN_STEP_S`. Pure.

Any step costs something, whatever is in it, and each token more. Where a step costs 25 ms by itself, one that ends
after 25 ms has no tokens at all: so a step may take `TIMES_FIXED` times what any step costs, and no more than a quarter
of the engine's time is lost to short steps.

The two costs are told apart by steps of two sizes: those that were measured last, and those before them that had half
as many tokens again, or as many less. Until there are such, all counts as the tokens' cost, and the limit is halved,
which makes them. What was measured of another size may be long out of date; then the limit moves in a wrong direction,
once, which measures a size anew. By each measurement it is doubled or halved at most.

    steps with at least half the limit     the limit becomes what fits by both costs
    smaller ones that took too long        likewise, but it does not grow: they say little of larger ones
    other smaller ones                     it stays
"""

from dataclasses import dataclass
from math import frexp, inf

# What a step takes while several tenants or priorities take turns.
TURN_STEP_S = 0.025
# Or so many times what any step costs, where that is more.
TIMES_FIXED = 4.0
# The first limit is no smaller: a single step of a few tokens says nothing of what tokens cost.
_FIRST_TOKENS = 256.0
# Two sizes that differ by less do not tell the two costs apart.
_APART = 1.5
# Of its weight a measurement keeps so much with each later one of any size: about the last five of a size count.
_KEEP = 0.8


@dataclass(slots=True)
class _Size:
    """Steps of about as many tokens: decayed means of one step. number: of its last measurement."""

    tokens: float
    seconds: float
    number: int
    weight: float = 1.0

    def add(self, tokens: float, seconds: float, number: int) -> None:
        self.weight = self.weight * _KEEP ** (number - self.number) + 1.0
        self.number = number
        self.tokens += (tokens - self.tokens) / self.weight
        self.seconds += (seconds - self.seconds) / self.weight


class StepLimit:
    """Told of what steps took."""

    def __init__(self) -> None:
        # Any number before steps have been measured that took too long.
        self.tokens = inf
        # What any step costs, and each of its tokens, in seconds; 0: not known.
        self.fixed_s = 0.0
        self.s_per_token = 0.0
        # By the binary order of their tokens.
        self._sizes: dict[int, _Size] = {}
        self._measured = 0

    @property
    def most_per_s(self) -> float:
        """No step computes more tokens a second; any number while the two costs are not told apart."""
        return 1 / self.s_per_token if self.fixed_s and self.s_per_token else inf

    def measured(self, tokens: float, seconds: float) -> None:
        """Steps took so long, and had so many tokens, in the mean."""
        are_told_apart = self._tell_apart(self._noted(tokens, seconds))
        most_s = max(TURN_STEP_S, TIMES_FIXED * self.fixed_s)
        fits = (most_s - self.fixed_s) / self.s_per_token if self.s_per_token else inf
        if not are_told_apart:
            fits = min(fits, tokens / 2)
        if tokens >= self.tokens / 2:
            self.tokens = min(max(fits, self.tokens / 2), 2 * tokens)
        elif seconds > most_s:
            least = _FIRST_TOKENS if self.tokens == inf else self.tokens / 2
            self.tokens = min(max(fits, least), self.tokens)

    def _noted(self, tokens: float, seconds: float) -> _Size:
        self._measured += 1
        order = frexp(tokens)[1]
        size = self._sizes.get(order)
        if size is None:
            size = self._sizes[order] = _Size(tokens, seconds, self._measured)
        else:
            size.add(tokens, seconds, self._measured)
        return size

    def _tell_apart(self, last: _Size) -> bool:
        """False: there is one size alone."""
        others = [each for each in self._sizes.values() if _are_apart(each.tokens, last.tokens)]
        self.fixed_s, self.s_per_token = 0.0, last.seconds / last.tokens
        if not others:
            return False
        other = max(others, key=lambda each: each.number)
        slope = (last.seconds - other.seconds) / (last.tokens - other.tokens)
        fixed_s = last.seconds - slope * last.tokens
        if slope <= 0:
            self.fixed_s, self.s_per_token = min(last.seconds, other.seconds), 0.0
        elif fixed_s > 0:
            self.fixed_s, self.s_per_token = fixed_s, slope
        return True


def _are_apart(one: float, other: float) -> bool:
    return max(one, other) >= _APART * min(one, other)
