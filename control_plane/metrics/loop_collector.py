"""Figures that only the router's loop may read, for Prometheus, whose scrapes run on threads of their own."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Seen = TypeVar("Seen")

logger = logging.getLogger(__name__)

# The router's loop has not come to it even then.
SCRAPE_TIMEOUT_S = 2.0


class LoopCollector(Collector, Generic[Seen]):
    """`collect` waits for `read`, which runs on the loop, for a bounded time; after that a scrape has no samples. What
    was seen becomes families on the scrape's own thread: with many workers that is far more work than to see it.

    what: whose figures these are, for the log.
    """

    what: str

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float = SCRAPE_TIMEOUT_S) -> None:
        self._loop = loop
        self._timeout_s = timeout_s

    @abstractmethod
    async def read(self) -> Seen:
        """What there is now, and nobody on the loop changes any more."""

    @abstractmethod
    def metrics(self, seen: Seen) -> list[Metric]:
        """All families of it. Not on the loop: it touches nothing but `seen`."""

    def collect(self) -> Iterable[Metric]:
        asked = asyncio.run_coroutine_threadsafe(self.read(), self._loop)
        try:
            seen = asked.result(self._timeout_s)
        except TimeoutError:
            asked.cancel()
            logger.warning("the router is busy: no metrics of %s in this scrape", self.what)
            return ()
        return self.metrics(seen)


class SmallLoopCollector(LoopCollector[list[Metric]]):
    """Of as many figures however many workers there are: `read` makes the families."""

    def metrics(self, seen: list[Metric]) -> list[Metric]:
        return seen
