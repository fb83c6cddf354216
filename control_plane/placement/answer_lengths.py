"""How long answers become, of what they may become. Pure.

`max_tokens` is a bound that many clients never come near: one who says nothing may fill the model's length. Memory and
time are planned for twice what answers of about that bound, by powers of two, have taken of it: the sum of what the
last some hundred have become over the sum of what they might. Twice, since the short ones end first. Until enough have
ended, all of it. One whose client left says nothing: it might have gone on.
"""

from math import frexp

# Of its weight an answer keeps so much with each later one.
_KEEP = 0.995
# Answers of which a bound's share is known.
_ENOUGH = 32
_MARGIN = 2.0


class AnswerLengths:
    """Of one router. Told of answers that were completed."""

    def __init__(self) -> None:
        # By the binary order of the bound: how many, tokens that they might have had, and that they have become.
        self._completed: dict[int, tuple[int, float, float]] = {}

    @property
    def count(self) -> int:
        """Answers that were completed."""
        return sum(count for count, _, _ in self._completed.values())

    def completed(self, most_tokens: int, tokens: int) -> None:
        count, most, became = self._completed.get(frexp(most_tokens)[1], (0, 0.0, 0.0))
        became = _KEEP * became + min(tokens, most_tokens)
        self._completed[frexp(most_tokens)[1]] = count + 1, _KEEP * most + most_tokens, became

    def left(self, most_tokens: int, emitted: int = 0) -> int:
        """What is expected to come of an answer that may have so many, of which so many are emitted; 1 at least. One
        that has become longer than is expected may become twice as long."""
        count, most, became = self._completed.get(frexp(most_tokens)[1], (0, 1.0, 1.0))
        expected = round(_MARGIN * most_tokens * became / most) if count >= _ENOUGH else most_tokens
        return max(1, min(max(expected - emitted, emitted), most_tokens - emitted))
