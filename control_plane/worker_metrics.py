"""The workers' figures for Prometheus, asked of the workers whenever Prometheus asks the router.

A worker that does not answer in time has no samples in that scrape.
"""

import asyncio
import logging
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.decode_metrics import decode_metrics
from control_plane.tier_metrics import tier_metrics
from control_plane.worker_views import WorkerViews

logger = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 1.0
# The router's loop has not come to it even then.
SCRAPE_TIMEOUT_S = 2.0


class WorkerCollector(Collector):
    """Asks on the router's loop; `collect` runs on the thread of a scrape, which waits for a bounded time."""

    def __init__(self, views: WorkerViews, loop: asyncio.AbstractEventLoop) -> None:
        self._views = views
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        asked = asyncio.run_coroutine_threadsafe(self._views.gather(WORKER_TIMEOUT_S), self._loop)
        try:
            views = asked.result(SCRAPE_TIMEOUT_S)
        except TimeoutError:
            asked.cancel()
            logger.warning("the router is busy: no metrics of workers in this scrape")
            return ()
        return [*tier_metrics(views), *decode_metrics(views)]
