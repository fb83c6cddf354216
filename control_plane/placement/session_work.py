"""What a session that is open counts for where another one is placed: what sessions' prompts have asked for of late.

Hardly anything of a session has come when it opens, and all that comes later is computed where it opened. Counted by
what has come, workers with many sessions look as idle as those without, and one of them gets nearly all. Each worker
takes its own time for it. Pure.
"""

from dataclasses import dataclass

import numpy as np

from control_plane.fleet.candidates import Fixed
from control_plane.fleet.loads import Floats

# The mean follows about so many.
_FOLLOWS = 20
# Until the first has become whole: what takes longer than what workers' own figures differ by, and is soon done.
_UNKNOWN_TOKENS = 1024.0
# By how much workers that are alike may differ in what they have measured.
_ABOUT = 1.5


@dataclass(frozen=True, slots=True)
class SessionWork:
    """Of a prompt in the mean: tokens that are computed, and pairs of such a token and one that it attends to. count:
    of the prompts that it is the mean of, as far as it matters."""

    tokens: float = _UNKNOWN_TOKENS
    pairs: float = _UNKNOWN_TOKENS * _UNKNOWN_TOKENS / 2
    count: int = 0

    def became_whole(self, tokens: int, cached_tokens: int) -> "SessionWork":
        """With a prompt of so many tokens, of which the session has found so many in a cache."""
        kept = min(max(cached_tokens, 0), tokens)
        pairs = (tokens * tokens - kept * kept) / 2
        count = min(self.count + 1, _FOLLOWS)
        return SessionWork(
            self.tokens + (tokens - kept - self.tokens) / count, self.pairs + (pairs - self.pairs) / count, count
        )

    def prefill_s(self, workers: Fixed) -> Floats:
        """Seconds of engine time on each; the usual ones on those that say about as much."""
        seconds = self._seconds(workers)
        usual_s = _usual_s(seconds)
        is_usual = (seconds < _ABOUT * usual_s) & (usual_s < _ABOUT * seconds)
        return np.where(is_usual, usual_s, seconds)

    def usual_s(self, workers: Fixed) -> float:
        """The median of theirs."""
        return _usual_s(self._seconds(workers))

    def _seconds(self, workers: Fixed) -> Floats:
        return workers.prefill_s + self.tokens * workers.prefill_s_per_token + self.pairs * workers.prefill_s_per_pair


def _usual_s(seconds: Floats) -> float:
    """The median, and of two the lower."""
    return float(np.sort(seconds)[(len(seconds) - 1) // 2]) if len(seconds) else 0.0
