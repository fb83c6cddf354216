"""How long answers become, of what they may become. Pure.

`max_tokens` is a bound that many clients never come near: one who says nothing may fill the model's length. Memory and
time are planned for what answers of about that bound, by powers of two, have taken of it: the sum of what the last some
hundred have become over the sum of what they might. Until some have ended, all of it.
"""

from math import ceil, frexp

# Of its weight an answer keeps so much with each later one.
_KEEP = 0.995
# Answers of which a bound's share is known.
_ENOUGH = 8


class AnswerLengths:
    """Of one router. Told of answers as they end."""

    def __init__(self) -> None:
        # By the binary order of the bound: how many have ended, tokens that they might have, and that they have become.
        self._ended: dict[int, tuple[int, float, float]] = {}

    def ended(self, most_tokens: int, tokens: int) -> None:
        """An answer of `tokens` that might have had `most_tokens`. One that never began says nothing."""
        if not tokens:
            return
        count, most, became = self._ended.get(frexp(most_tokens)[1], (0, 0.0, 0.0))
        became = _KEEP * became + min(tokens, most_tokens)
        self._ended[frexp(most_tokens)[1]] = count + 1, _KEEP * most + most_tokens, became

    def expected(self, most_tokens: int) -> int:
        """Of an answer that may have so many."""
        count, most, became = self._ended.get(frexp(most_tokens)[1], (0, 1.0, 1.0))
        return most_tokens if count < _ENOUGH else min(most_tokens, max(1, ceil(most_tokens * became / most)))
