"""What the workers say of themselves now, beside what the router knows of them."""

import asyncio
from collections.abc import Sequence

from rachis.v1 import admin_pb2 as admin

from cluster_core.errors import RachisError
from control_plane.membership import Member, Membership
from control_plane.worker_client import WorkerClient


class WorkerViews:
    def __init__(self, membership: Membership, client: WorkerClient) -> None:
        self._membership = membership
        self._client = client

    async def gather(self, timeout_s: float, *, hottest_prefixes: int = 0) -> Sequence[admin.WorkerView]:
        """Of all workers, asked at the same time. One that does not answer in time has no load in its view."""
        views = (self._view(member, timeout_s, hottest_prefixes) for member in self._membership.members())
        return await asyncio.gather(*views)

    async def _view(self, member: Member, timeout_s: float, hottest_prefixes: int) -> admin.WorkerView:
        view = admin.WorkerView(
            registration=member.registration,
            in_flight_requests=member.in_flight_requests,
            suspect=member.suspect_since_s is not None,
        )
        if not member.registration.address:
            return view
        try:
            status = await self._client.status(member.registration.address, timeout_s, hottest_prefixes)
        except RachisError:
            return view
        view.load.CopyFrom(status.load)
        view.counters.CopyFrom(status.counters)
        if status.HasField("tiers"):
            view.tiers.CopyFrom(status.tiers)
        if status.HasField("hottest"):
            view.hottest.CopyFrom(status.hottest)
        return view
