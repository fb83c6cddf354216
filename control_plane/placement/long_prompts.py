"""From which length on a prompt is long: those above bring two fifths of the prefill work, however few they are. Pure.

Short prompts wait seconds behind a long one. Long ones therefore keep to one half of the pool, at a price and not by a
wall: behind a wall they wait for minutes when it is their half that is busy.

Source: Harchol-Balter, Crovella, Murta, "On choosing a task assignment policy for a distributed server system" (1999):
queues by size with equal work.
"""

import math
from collections import deque

import numpy as np

_SHORT_SHARE = 0.6
_REMEMBERED = 1024
_EVERY = 64


class LongPrompts:
    """long_s: seconds of engine time above which a prefill is long; infinite before enough have been seen."""

    def __init__(self) -> None:
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._added = 0
        self.long_s = math.inf

    def add(self, expected_s: float) -> None:
        """A prefill was placed that is expected to take so long."""
        self._works.append(expected_s)
        self._added += 1
        if self._added % _EVERY == 0:
            works = np.sort(np.array(self._works))
            total = np.cumsum(works)
            self.long_s = float(works[np.searchsorted(total, _SHORT_SHARE * total[-1])])
