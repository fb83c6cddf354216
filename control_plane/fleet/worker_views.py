"""What the workers say of themselves now, beside what the router knows of them."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import RachisError
from control_plane.fleet.membership import Member, Membership
from control_plane.fleet.worker_client import WorkerClient

_WHERE_THERE: tuple[Literal["tiers", "hottest", "decode", "batch"], ...] = ("tiers", "hottest", "decode", "batch")


class WorkerViews:
    def __init__(self, membership: Membership, client: WorkerClient) -> None:
        self._membership = membership
        self._client = client

    async def gather(self, timeout_s: float, asked: admin.ListWorkersRequest) -> Sequence[admin.WorkerView]:
        """Of the workers, asked at the same time. One that does not answer in time has no load in its view."""
        request = wire.GetWorkerStatusRequest(
            hottest_prefixes=asked.hottest_prefixes, batch_entries=asked.batch_entries
        )
        wanted = frozenset(asked.worker_ids)
        members = (member for member in self._membership.members() if not wanted or member.worker_id in wanted)
        return await asyncio.gather(*(self._view(member, timeout_s, request) for member in members))

    async def _view(self, member: Member, timeout_s: float, request: wire.GetWorkerStatusRequest) -> admin.WorkerView:
        view = admin.WorkerView(
            registration=member.registration,
            in_flight_requests=member.in_flight_requests,
            suspect=member.is_suspect,
            version_skew=member.version_skew,
        )
        if not member.registration.address:
            return view
        try:
            status = await self._client.status(member.registration.address, request, timeout_s)
        except RachisError:
            return view
        view.load.CopyFrom(status.load)
        view.counters.CopyFrom(status.counters)
        for name in _WHERE_THERE:
            if status.HasField(name):
                getattr(view, name).CopyFrom(getattr(status, name))
        return view
