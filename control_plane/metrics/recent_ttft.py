"""The time to first token of the requests of late: what pools that follow their load go by."""

import math
from collections import deque

_WINDOW_S = 30.0
_FEWEST = 5
_MOST = 10_000
_SHARE = 0.9


class RecentTtft:
    """Pure: `now_s` is monotonic."""

    def __init__(self) -> None:
        # When it was observed, when it was asked for, and how much it says.
        self._observed: deque[tuple[float, float, float]] = deque(maxlen=_MOST)

    def observe(self, now_s: float, ttft_s: float, counts_for: float = 1.0) -> None:
        """counts_for: so many times what it was."""
        self._observed.append((now_s, now_s - ttft_s, ttft_s * counts_for))

    def kept_by_most(self, now_s: float, since_s: float = -math.inf) -> float | None:
        """What 90% of the last half minute kept, of those asked for after `since_s`; None where there were too few to
        say."""
        while self._observed and self._observed[0][0] < now_s - _WINDOW_S:
            self._observed.popleft()
        counted = sorted(ttft_s for _, asked_s, ttft_s in self._observed if asked_s > since_s)
        return counted[int(_SHARE * (len(counted) - 1))] if len(counted) >= _FEWEST else None
