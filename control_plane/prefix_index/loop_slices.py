"""Work on the event loop in slices of a millisecond, so that requests do not wait for it."""

import asyncio
from collections.abc import Callable

from cluster_core.clock import monotonic_s

_SLICE_S = 0.001


class LoopSlices:
    """`begin` where the work got the event loop, `rest` between two parts of it."""

    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = self._now_s()

    async def rest(self) -> None:
        """Gives the event loop to others where this slice is over."""
        if self._now_s() - self._began_s >= _SLICE_S:
            await asyncio.sleep(0)
            self.begin()
