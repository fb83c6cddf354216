"""Drains a worker that is to end: it is told to take nothing new, and asked until nothing is left on it.

It is told again whenever it says that it is not draining, because somebody has taken it back meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import LimitsSection
from cluster_core.errors import RachisError
from control_plane.fleet.membership import Member, Membership
from control_plane.fleet.worker_client import WorkerClient
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
        """Until it is idle, gone, or out of time. One that does not answer is asked again: it may only be busy."""
        first = self._membership.get(worker.worker_id)
        if first is None or not first.registration.address or first.registration.generation <= worker.past_generation:
            return
        generation = first.registration.generation
        worker.is_at(admin.POOL_PHASE_DRAINING)
        until_s = self._now_s() + self._limits.drain_timeout_s
        while self._now_s() < until_s:
            member = self._membership.get(worker.worker_id)
            try:
                held = await self._held(member or first)
            except RachisError as error:
                if member is None or member.registration.generation != generation:
                    logger.warning("%s went away while it drained: %s", worker.worker_id, error)
                    return
                held = f"it does not answer: {error}"
            if not held:
                return
            worker.is_at(admin.POOL_PHASE_DRAINING, held)
            await asyncio.sleep(self._look_every_s)
        logger.error("%s leaves after %g s: %s", worker.worker_id, self._limits.drain_timeout_s, worker.detail)

    async def _tell_to_drain(self, address: str) -> None:
        grace_s = self._limits.session_grace_s
        await self._client.set_draining(address, True, _STATUS_TIMEOUT_S, move_sessions_after_s=grace_s)

    async def _held(self, member: Member) -> str:
        """What keeps a worker that drains from being idle, in words; empty where nothing does."""
        request, address = wire.GetWorkerStatusRequest(), member.registration.address
        status = await self._client.status(address, request, _STATUS_TIMEOUT_S)
        if status.registration.state != wire.WORKER_STATE_DRAINING:
            # Not told yet, or somebody has taken it back.
            await self._tell_to_drain(address)
            return "takes nothing new"
        load = status.load
        running = max(load.active_calls, load.running_requests + load.waiting_requests, member.in_flight_requests)
        if not (running or load.leased_handoffs):
            return ""
        return f"{running} requests run, {load.leased_handoffs} hand-offs wait for their pull"
