"""Drains a worker that is to end: it is told to take nothing new, and asked until nothing is left on it.

It is told again whenever it says that it is not draining, because somebody has taken it back meanwhile. One whose
registration has ended is asked where it was last: cut off from Redis alone, it still answers routers.
"""

import asyncio
import logging
from collections.abc import Callable

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import LimitsSection
from cluster_core.errors import RachisError
from cluster_core.ids import WorkerId
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import WorkerClient, WorkerLostError
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.pools.roster import PoolWorker

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 2.0


class Draining:
    """membership, client: the router's own."""

    def __init__(
        self,
        limits: LimitsSection,
        membership: Membership,
        client: WorkerClient,
        look_every_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._membership = membership
        self._client = client
        self._look_every_s = look_every_s
        self._now_s = now_s

    async def until_idle(self, worker: PoolWorker) -> None:
        """Until it is idle, gone, or out of time. One that is registered and does not answer is asked again: it may
        only be busy."""
        first = self._start_of(worker)
        if first is None:
            return
        start = first
        worker.is_at(admin.POOL_PHASE_DRAINING)
        until_s = self._now_s() + self._limits.drain_timeout_s
        while self._now_s() < until_s:
            member = self._membership.get(worker.worker_id)
            start = self._start_of(worker) or start
            try:
                held = await self._held(start, member.in_flight_requests if member is not None else 0)
            except RachisError as error:
                if member is None or member.registration.generation != first.generation:
                    logger.warning("%s went away while it drained: %s", worker.worker_id, error)
                    return
                held = f"it does not answer: {error}"
            if not held:
                return
            worker.is_at(admin.POOL_PHASE_DRAINING, held)
            await asyncio.sleep(self._look_every_s)
        logger.error("%s leaves after %g s: %s", worker.worker_id, self._limits.drain_timeout_s, worker.detail)

    def _start_of(self, worker: PoolWorker) -> WorkerSnapshot | None:
        """The present one, as the registry has it or had it last; None where it never had it."""
        member = self._membership.get(worker.worker_id)
        generation, address = worker.seen_generation, worker.address
        if member is not None:
            generation, address = member.registration.generation, member.registration.address
        if not address or generation <= worker.past_generation:
            return None
        return WorkerSnapshot(WorkerId(worker.worker_id), generation, worker.pool, address)

    async def _tell_to_drain(self, address: str) -> None:
        grace_s = self._limits.session_grace_s
        await self._client.set_draining(address, True, _STATUS_TIMEOUT_S, move_sessions_after_s=grace_s)

    async def _held(self, start: WorkerSnapshot, in_flight: int) -> str:
        """What keeps a worker that drains from being idle, in words; empty where nothing does. in_flight: requests that
        this router has there.

        Raises WorkerLostError where its port is another one's by now.
        """
        status = await self._client.status(start.address, wire.GetWorkerStatusRequest(), _STATUS_TIMEOUT_S)
        if (status.registration.worker_id, status.registration.generation) != (start.worker_id, start.generation):
            raise WorkerLostError("another worker answers there")
        if status.registration.state != wire.WORKER_STATE_DRAINING:
            # Not told yet, or somebody has taken it back.
            await self._tell_to_drain(start.address)
            return "takes nothing new"
        load = status.load
        running = max(load.active_calls, load.running_requests + load.waiting_requests, in_flight)
        if not (running or load.leased_handoffs):
            return ""
        return f"{running} requests run, {load.leased_handoffs} hand-offs wait for their pull"
