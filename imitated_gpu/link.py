"""The link of one imitated worker: transfers that share its bandwidth equally, in real time; pure.

Times are seconds of one monotonic clock. It is the receiver's link alone: what others pull from the same sender at the
same time does not slow a transfer.
"""

import math
from collections.abc import Hashable


class SharedLink:
    """latency_s: of each transfer, before its first byte."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        # Their first bytes come then, and how many there are.
        self._waiting: dict[Hashable, tuple[float, int]] = {}
        # Bytes that are left of each.
        self._flowing: dict[Hashable, float] = {}
        self._now_s = 0.0

    def begin(self, name: Hashable, size: int, now_s: float) -> None:
        self._go_on(now_s)
        self._waiting[name] = (now_s + self._latency_s, size)

    def is_over(self, name: Hashable, now_s: float) -> bool:
        """Whether a transfer that has begun is done; one that was never begun, or was forgotten, is."""
        self._go_on(now_s)
        return name not in self._waiting and name not in self._flowing

    def forget(self, name: Hashable, now_s: float) -> None:
        """Nobody waits for it, and it takes no bandwidth any more."""
        self._go_on(now_s)
        self._waiting.pop(name, None)
        self._flowing.pop(name, None)

    def _go_on(self, now_s: float) -> None:
        """From one start or end of a transfer to the next, up to now."""
        while self._now_s < now_s:
            for name in [each for each, (at_s, _) in self._waiting.items() if at_s <= self._now_s]:
                self._flowing[name] = self._waiting.pop(name)[1]
            until_s = min([now_s, *(at_s for at_s, _ in self._waiting.values())])
            if self._flowing:
                share = self._bytes_per_s / len(self._flowing)
                least = min(self._flowing.values())
                until_s = min(until_s, max(self._now_s + least / share, math.nextafter(self._now_s, math.inf)))
                moved = (until_s - self._now_s) * share
                # Less than a byte is rounding, which a clock cannot tell from nothing: it would be waited for for ever.
                self._flowing = {name: left - moved for name, left in self._flowing.items() if left - moved >= 1}
            self._now_s = until_s
