"""How many tokens a step has while tenants take turns: what the engine computes in `TURN_STEP_S`. Pure.

Any step costs something, whatever is in it, and each token more. Where a step costs 25 ms by itself, one that ends
after 25 ms has no tokens at all: so a step may take `TIMES_FIXED` times what any step costs, and no more than a quarter
of the engine's time is lost to short steps.

The two costs are told apart by steps of several sizes: by the line through the mean of the size that is measured most,
with the least squares of what the others deviate from it, relative to what they take. About the last fifty measurements
count, since a host that is often late makes of a single one what it likes: one that is far from the line counts as if
it took half as long again, or two thirds. Where the last five are off together, the engine has changed, and each of
the next five measurements halves what was before.

Until there are two sizes, or where all others were measured too long ago, all counts as the tokens' cost, and the limit
is halved, which makes another size. By each measurement it is doubled or halved at most.

    steps with at least half the limit     the limit becomes what fits by both costs
    smaller ones that took too long        likewise, but it does not grow: they say little of larger ones
    other smaller ones                     it stays
"""

from dataclasses import dataclass
from math import frexp, inf, log

# What a step takes while several tenants or priorities take turns.
TURN_STEP_S = 0.025
# Or so many times what any step costs, where that is more.
TIMES_FIXED = 4.0
# The first limit is no smaller: a single step of a few tokens says nothing of what tokens cost.
_FIRST_TOKENS = 256.0
# Two sizes that differ by less do not tell the two costs apart.
_APART = 1.5
# Of its weight a measurement keeps so much with each later one of any size: about the last fifty count.
_KEEP = 0.98
# Where the engine has changed: about the last five are further from what was expected than by this factor.
_KEEP_CHANGED = 0.5
_KEEP_OFF = 0.8
_CHANGED = log(1.2)
_CHANGES_FOR = 5
# A measurement that is further from what was expected, by this factor, counts as one that is as far.
_FAR_OFF = 1.5
# Other sizes with less weight together were measured too long ago.
_STALE = 0.5


@dataclass(slots=True)
class _Size:
    """Steps of about as many tokens: decayed means of one step. weight: as of the last measurement of any size."""

    tokens: float
    seconds: float
    weight: float = 1.0

    def add(self, tokens: float, seconds: float) -> None:
        self.weight += 1.0
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
        # Decayed mean of how far measurements are from what was expected; a logarithm.
        self._off = 0.0
        # Measurements during which the engine counts as changed.
        self._changes_for = 0

    @property
    def most_per_s(self) -> float:
        """No step computes more tokens a second; any number while the two costs are not told apart."""
        return 1 / self.s_per_token if self.fixed_s and self.s_per_token else inf

    def measured(self, tokens: float, seconds: float) -> None:
        """Steps took so long, and had so many tokens, in the mean."""
        self._note(tokens, seconds)
        are_told_apart = self._tell_apart()
        most_s = max(TURN_STEP_S, TIMES_FIXED * self.fixed_s)
        fits = (most_s - self.fixed_s) / self.s_per_token if self.s_per_token else inf
        if not are_told_apart:
            fits = min(fits, tokens / 2)
        if tokens >= self.tokens / 2:
            self.tokens = max(1.0, min(max(fits, self.tokens / 2), 2 * tokens))
        elif seconds > most_s:
            least = _FIRST_TOKENS if self.tokens == inf else self.tokens / 2
            self.tokens = min(max(fits, least), self.tokens)

    def _note(self, tokens: float, seconds: float) -> None:
        expected_s = self.fixed_s + self.s_per_token * tokens if self.fixed_s and self.s_per_token else seconds
        seconds = min(max(seconds, expected_s / _FAR_OFF), expected_s * _FAR_OFF)
        self._off += (1 - _KEEP_OFF) * (log(seconds / expected_s) - self._off)
        self._changes_for = _CHANGES_FOR if abs(self._off) >= _CHANGED else max(0, self._changes_for - 1)
        keep = _KEEP_CHANGED if self._changes_for else _KEEP
        for each in self._sizes.values():
            each.weight = keep * each.weight
        order = frexp(tokens)[1]
        if order in self._sizes:
            self._sizes[order].add(tokens, seconds)
        else:
            self._sizes[order] = _Size(tokens, seconds)

    def _tell_apart(self) -> bool:
        """False: there is one size alone, of late."""
        most = max(self._sizes.values(), key=lambda each: each.weight)
        others = [each for each in self._sizes.values() if _are_apart(each.tokens, most.tokens)]
        self.fixed_s, self.s_per_token = 0.0, most.seconds / most.tokens
        if sum(each.weight for each in others) < _STALE:
            return False
        slope = _slope(most, others)
        fixed_s = most.seconds - slope * most.tokens
        if slope <= 0:
            self.fixed_s, self.s_per_token = min(each.seconds for each in (most, *others)), 0.0
        elif fixed_s > 0:
            self.fixed_s, self.s_per_token = fixed_s, slope
        return True


def _slope(through: _Size, others: list[_Size]) -> float:
    """In seconds per token."""
    weights = [each.weight / each.seconds**2 for each in others]
    apart = [each.tokens - through.tokens for each in others]
    covariance = sum(
        weight * tokens * (each.seconds - through.seconds)
        for weight, tokens, each in zip(weights, apart, others, strict=True)
    )
    return covariance / sum(weight * tokens**2 for weight, tokens in zip(weights, apart, strict=True))


def _are_apart(one: float, other: float) -> bool:
    return max(one, other) >= _APART * min(one, other)
