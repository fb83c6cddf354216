"""What all processes of a service have logged, in order of time.

A router reads its own file and those of the gateways beside it. Of each host with workers one worker is asked, which
reads for all of that host, those that are gone included. Nobody is waited for without a bound.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core import event_log
from cluster_core.errors import RachisError
from cluster_core.event_log import LogEvent
from cluster_core.log_files import LogQuery, last_of, read_own
from cluster_wire.log_messages import events_to_wire, query_from_wire
from control_plane.fleet.membership import Member, Membership
from control_plane.fleet.worker_client import WorkerClient

ANSWER_TIMEOUT_S = 3.0
# Workers of a host that are asked, one after the other, until one answers.
_MOST_ASKED = 2


def read_beside(query: LogQuery) -> Sequence[LogEvent]:
    """Of the file that this process writes, and of the gateways whose files lie beside it."""
    own = event_log.log_file()
    return read_own(_beside(own), query) if own is not None else ()


class ServiceLogs:
    """read_here: of this host's own processes; called on a thread."""

    def __init__(
        self,
        membership: Membership,
        client: WorkerClient,
        read_here: Callable[[LogQuery], Sequence[LogEvent]] = read_beside,
    ) -> None:
        self._membership = membership
        self._client = client
        self._read_here = read_here

    async def read(self, query: wire.LogQuery) -> admin.GetLogsResponse:
        by_node: dict[str, list[Member]] = {}
        for member in self._membership.members():
            by_node.setdefault(member.registration.node, []).append(member)
        told: list[wire.LogEvent] = []
        missing: list[str] = []

        async def read_here() -> None:
            told.extend(events_to_wire(await asyncio.to_thread(self._read_here, query_from_wire(query))))

        async def read_at(node: str, members: Sequence[Member]) -> None:
            answer = await self._of_node(node, members, query)
            if isinstance(answer, str):
                missing.append(answer)
            else:
                told.extend(answer)

        await asyncio.gather(read_here(), *(read_at(node, members) for node, members in by_node.items()))
        events = last_of(told, query.most_events, _at, wire.LogEvent.ByteSize)
        return admin.GetLogsResponse(events=events, missing=missing)

    async def _of_node(
        self, node: str, members: Sequence[Member], query: wire.LogQuery
    ) -> Sequence[wire.LogEvent] | str:
        """Or the sentence that says why there is nothing of this node."""
        why = "no worker of it serves"
        serving = [member for member in members if member.registration.address]
        for member in sorted(serving, key=lambda member: member.is_suspect)[:_MOST_ASKED]:
            try:
                answer = await self._client.logs(member.registration.address, query, ANSWER_TIMEOUT_S)
            except RachisError as error:
                why = str(error)
                continue
            for event in answer.events:
                event.node = node
            return answer.events
        return f"the logs of {node} cannot be read: {why}"


def _beside(own: Path) -> Iterable[Path]:
    return (own, own.with_name(f"{own.name}.1"), *own.parent.glob("gateway-*.log"))


def _at(event: wire.LogEvent) -> int:
    return event.unix_ms
