"""Lets pools follow their load, where they are configured to: a sample every second, a decision, a new size.

The samples are what the router has anyway: the workers' last registrations, its own queue, and the TTFT of the
requests of late, but for those from before the pool's last worker was ready: they say nothing of the pool as it is now.
While the registry does not answer these stand still: no sample is taken, and all begins anew. See
`control_plane.pools.autoscaling` for when a pool changes.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s
from control_plane.fleet.membership import Membership
from control_plane.metrics.recent_ttft import RecentTtft
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.autoscaling import Autoscaler, PoolSample
from control_plane.pools.life import Pools
from control_plane.pools.pool_sections import POOL_NAMES, sections
from control_plane.pools.timing import POOL_TIMING, PoolTiming

logger = logging.getLogger(__name__)

_COMING = (admin.POOL_PHASE_PENDING, admin.POOL_PHASE_STARTING)
# A pool is used as much as it was on average over about so many samples.
_USAGE_SAMPLES = 10


class PoolFollowing:
    """Of one service, beside its pools. queued: requests in the router's queue that more workers would take. connected:
    the registry answers."""

    def __init__(
        self,
        config: RachisConfig,
        pools: Pools,
        membership: Membership,
        ttft: RecentTtft,
        queued: Callable[[], int],
        timing: PoolTiming = POOL_TIMING,
        now_s: Callable[[], float] = monotonic_s,
        connected: Callable[[], bool] = lambda: True,
    ) -> None:
        self._autoscalers = {
            pool: Autoscaler(section.autoscale, config.objectives.ttft_s)
            for pool, section in sections(config.pools).items()
            if section.autoscale.enabled
        }
        self._pools = pools
        self._membership = membership
        self._ttft = ttft
        self._queued = queued
        self._every_s = timing.sample_every_s
        self._now_s = now_s
        self._connected = connected
        # Of late: the share of workers that compute, and of the places in their batches that are taken.
        self._usage: dict[Pool, tuple[float, ...]] = {}
        # Workers that are not ready yet, or were lost, and since when.
        self._start_timeout_s = config.limits.start_timeout_s
        self._coming_since_s: dict[str, float] = {}
        # When a pool last had somebody coming.
        self._came_s: dict[Pool, float] = {}

    async def run(self) -> None:
        """Until cancelled; returns at once where no pool follows its load."""
        while self._autoscalers:
            await asyncio.sleep(self._every_s)
            try:
                self.look(self._now_s())
            except Exception:
                logger.exception("pools could not follow their load")

    def look(self, now_s: float) -> None:
        """One sample of each pool, and what follows from it."""
        if not self._connected():
            self._begin_anew()
            return
        pools = self._pools.status()
        self._note_who_comes(pools, now_s)
        for status in pools:
            if status.pool in self._autoscalers and not self._pools.restarting():
                self._follow(status, now_s)

    def _begin_anew(self) -> None:
        self._usage.clear()
        for autoscaler in self._autoscalers.values():
            autoscaler.begin_anew()

    def _note_who_comes(self, pools: Sequence[admin.PoolStatus], now_s: float) -> None:
        since_s = self._coming_since_s
        self._coming_since_s = {
            worker.worker_id: since_s.get(worker.worker_id, now_s)
            for status in pools
            for worker in status.workers
            if worker.phase in _COMING
        }

    def _may_come(self, worker: admin.PoolWorker, now_s: float) -> bool:
        """One for which there is no room, or that does not start, does not keep its pool from growing for ever."""
        since_s = self._coming_since_s.get(worker.worker_id)
        return since_s is not None and now_s - since_s <= self._start_timeout_s

    def _follow(self, status: admin.PoolStatus, now_s: float) -> None:
        wanted = self._autoscalers[status.pool].decide(now_s, self._sample(status, now_s))
        if wanted != status.desired_workers:
            logger.warning("pool %s: %d workers -> %d", POOL_NAMES[status.pool], status.desired_workers, wanted)
            self._pools.resize(status.pool, wanted)

    def _sample(self, status: admin.PoolStatus, now_s: float) -> PoolSample:
        records = [
            member.registration
            for member in self._membership.members()
            if member.registration.pool == status.pool and member.registration.state == wire.WORKER_STATE_READY
        ]
        coming = sum(self._may_come(worker, now_s) for worker in status.workers)
        if coming:
            self._came_s[status.pool] = now_s
        computing, places = _usage(records)
        usage = self._usage.get(status.pool, (1.0, 1.0))
        computing, places = self._usage[status.pool] = tuple(
            before + (now - before) / _USAGE_SAMPLES for before, now in zip(usage, (computing, places), strict=True)
        )
        return PoolSample(
            desired=status.desired_workers,
            ready=status.ready_workers,
            coming=coming,
            waiting=sum(record.load.waiting_requests for record in records) + self._queued(),
            # One prompt may fill a step.
            usage=computing if status.pool == wire.POOL_PREFILL else places,
            computing=computing,
            ttft_s=None if status.pool == wire.POOL_DECODE else self._kept_ttft_s(status.pool, now_s),
        )

    def _kept_ttft_s(self, pool: Pool, now_s: float) -> float | None:
        return self._ttft.kept_by_most(now_s, self._came_s.get(pool, -math.inf))


def _usage(records: Sequence[wire.WorkerRegistration]) -> tuple[float, float]:
    """The share of workers that compute, and of the places in their batches that are taken."""
    if not records:
        return 1.0, 1.0
    running = [record.load.running_requests for record in records]
    places = sum(record.max_running_requests for record in records)
    return sum(each > 0 for each in running) / len(records), sum(running) / max(places, 1)
