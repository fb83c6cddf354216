"""The pause between two polls: short while something comes, the longer the longer nothing has."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from cluster_core.clock import monotonic_s

# A poll comes so late at most, as a share of how long it has been quiet before it.
_OF_THE_QUIET = 0.1
# The longest pause, in shortest ones.
EASED = 10


class EasingPause:
    """Awaited by each loop that polls; loops whose news come together may share one.

    A service that nobody asks anything spends most of what it spends on polls that find nothing.
    """

    def __init__(self, least_s: float, most_s: float, now_s: Callable[[], float] = monotonic_s) -> None:
        """most_s: no pause is longer, unless the shortest one is; nor is one longer than `EASED` shortest ones."""
        self._least_s = least_s
        self._most_s = min(most_s, EASED * least_s)
        self._now_s = now_s
        self._came_s = now_s()
        self._woken = asyncio.Event()

    def came(self) -> None:
        """A poll has found something, or there is reason to believe that the next one will: a long pause ends now."""
        self._came_s = self._now_s()
        self._woken.set()

    async def __call__(self) -> None:
        await asyncio.sleep(self._least_s)
        quiet_s = self._now_s() - self._came_s
        more_s = min(_OF_THE_QUIET * quiet_s, self._most_s) - self._least_s
        if more_s > 0:
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(more_s):
                    await self._woken.wait()
