"""How many requests lie between two accesses of a block, typically: the median over the last thousand prompts or so.

A histogram over the logarithm, whose weights fade with each prompt that reuses anything. It begins with a guess that
weighs as much as a thousand gaps. A block that left all tiers counts as well, as far as the hotness filter remembers
it: else a worker that evicts early would see short gaps only, and evict earlier still.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BUCKETS_PER_OCTAVE = 4
# Up to 2**32 requests.
_BUCKETS = 32 * _BUCKETS_PER_OCTAVE
_GUESS_GAPS = 1000
_KEPT_PER_PROMPT = 1 - 1 / 1000


class ReuseGaps:
    """See the module."""

    def __init__(self, guess_requests: float) -> None:
        self._weights = np.zeros(_BUCKETS)
        self._weights[_buckets([guess_requests])] = _GUESS_GAPS

    def add(self, gaps_requests: Sequence[float]) -> None:
        """Those of a prompt's blocks that were accessed before."""
        if gaps_requests:
            self._weights *= _KEPT_PER_PROMPT
            self._weights += np.bincount(_buckets(gaps_requests), minlength=_BUCKETS)

    def median_requests(self) -> float:
        """At least 1. Within its bucket it lies where the weights say."""
        sums = self._weights.cumsum()
        half = sums[-1] / 2
        bucket = int(sums.searchsorted(half))
        part = 1 - (sums[bucket] - half) / self._weights[bucket]
        return float(2 ** ((bucket + part) / _BUCKETS_PER_OCTAVE))


def _buckets(gaps_requests: Sequence[float]) -> NDArray[np.intp]:
    octaves = np.log2(np.maximum(1, gaps_requests))
    buckets: NDArray[np.intp] = np.minimum(_BUCKETS - 1, octaves * _BUCKETS_PER_OCTAVE).astype(np.intp)
    return buckets
