"""The time to first token of the requests of late: what pools that follow their load go by."""

from collections import deque

_WINDOW_S = 30.0
_FEWEST = 5
_MOST = 10_000
_SHARE = 0.9


class RecentTtft:
    """Pure: `now_s` is monotonic."""

    def __init__(self) -> None:
        self._observed: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def observe(self, now_s: float, ttft_s: float) -> None:
        self._observed.append((now_s, ttft_s))

    def kept_by_most(self, now_s: float) -> float | None:
        """What 90% of the last half minute kept; None where there were too few to say."""
        while self._observed and self._observed[0][0] < now_s - _WINDOW_S:
            self._observed.popleft()
        if len(self._observed) < _FEWEST:
            return None
        return sorted(ttft_s for _, ttft_s in self._observed)[int(_SHARE * (len(self._observed) - 1))]
