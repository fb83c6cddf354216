"""How long answers become, of what they may become. Pure.

`max_tokens` is a bound that many clients never come near: one who says nothing may fill the model's length. Memory and
time are planned for twice what answers of about that bound, by powers of two, have taken of it: the sum of what the
last some hundred have become over the sum of what they might. Twice, since the short ones end first. One whose client
leaves takes memory until then, and counts with what it has become.

Until enough of about that bound have ended, they are planned for twice what answers have become whatever their bounds,
at least for `_UNKNOWN` tokens: 99% of the answers of Mooncake's conversations, all of Azure's of 2023 and 91% of coding
agents' have no more. To plan for all that they may become would refuse most requests of a router that has just begun,
and since few are let in it would take long to learn better. Planned too little, vLLM preempts.
"""

from math import frexp

# Of its weight an answer keeps so much with each later one.
_KEEP = 0.995
# Answers of which a bound's share is known.
_ENOUGH = 32
_MARGIN = 2.0
_UNKNOWN = 1024
# An order that no bound has.
_ANY = -1


class AnswerLengths:
    """Of one router. Told of answers that have ended. bounds_are_exact: each becomes as long as it may."""

    def __init__(self, *, bounds_are_exact: bool = False) -> None:
        self._bounds_are_exact = bounds_are_exact
        # By the binary order of the bound: how many, tokens that they might have had, and that they have become. Of
        # any bound: as if each might have had one.
        self._ended: dict[int, tuple[int, float, float]] = {}

    @property
    def count(self) -> int:
        """Answers that have ended."""
        return self._ended.get(_ANY, (0, 0.0, 0.0))[0]

    def ended(self, most_tokens: int, tokens: int) -> None:
        """tokens: of the answer, 1 at least."""
        for order, most in ((frexp(most_tokens)[1], most_tokens), (_ANY, 1)):
            count, might, became = self._ended.get(order, (0, 0.0, 0.0))
            self._ended[order] = count + 1, _KEEP * might + most, _KEEP * became + min(tokens, most_tokens)

    def left(self, most_tokens: int, emitted: int = 0) -> int:
        """What is expected to come of an answer that may have so many, of which so many are emitted; 1 at least. One
        that has become longer than is expected may become twice as long."""
        expected = most_tokens if self._bounds_are_exact else round(_MARGIN * self._expected(most_tokens))
        return max(1, min(max(expected - emitted, emitted), most_tokens - emitted))

    def _expected(self, most_tokens: int) -> float:
        count, might, became = self._ended.get(frexp(most_tokens)[1], (0, 1.0, 1.0))
        if count >= _ENOUGH:
            return most_tokens * became / might
        count, might, became = self._ended.get(_ANY, (0, 1.0, 0.0))
        return max(_UNKNOWN / _MARGIN, became / might if count >= _ENOUGH else 0.0)
