"""What all processes of a service have logged, in order of time.

A router reads its own file, those of the routers that share its port, and those of the gateways beside it. Of each host
with workers one worker is asked, which reads for all of that host, those that are gone included. Nobody is waited for
without a bound.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core import event_log
from cluster_core.clock import unix_ms
from cluster_core.errors import RachisError
from cluster_core.event_log import LogEvent
from cluster_core.ids import is_of_one_start
from cluster_core.log_files import LogQuery, ReadLogs, Told, last_of, read_own
from cluster_core.log_reader import LogReader
from cluster_wire.log_messages import events_to_wire, query_from_wire
from control_plane.fleet.membership import Member, Membership
from control_plane.fleet.worker_client import WorkerClient

ANSWER_TIMEOUT_S = 3.0
# Workers of a host that are asked, one after the other, until one answers.
_MOST_ASKED = 2
# The node of this router's own processes, in messages.
_HERE = ""
_OWN = "the logs of this router and its gateways cannot be read"


def read_beside(query: LogQuery) -> Told[LogEvent]:
    """Of the file that this process writes, and of the routers and gateways whose files lie beside it."""
    own = event_log.log_file()
    if own is None:
        return Told(())
    file, service = own
    # Why the start before has ended stands there under another id.
    return read_own(beside(file), "" if is_of_one_start(service) else service, query)


def beside(own: Path) -> Iterable[Path]:
    """The files of a router, of those that share its port and of its gateways: what each writes, and what it wrote
    before."""
    # Those that share a port, and who keeps them.
    keeper = re.sub(r"^(router-route-\d+)-\d+$", r"\1", own.stem)
    names = {own.stem, keeper, f"{keeper}-[0-9]*" if keeper != own.stem else own.stem, "gateway-*"}
    ends = ("log", "log.1")
    return {file for name in names for end in ends for file in own.parent.glob(f"{name}.{end}")}


class ServiceLogs:
    """read_here: of this host's own processes; called on a thread."""

    def __init__(self, membership: Membership, client: WorkerClient, read_here: ReadLogs = read_beside) -> None:
        self._membership = membership
        self._client = client
        self._here = LogReader(read_here)

    async def read(self, request: admin.GetLogsRequest) -> admin.GetLogsResponse:
        by_node: dict[str, list[Member]] = {}
        for member in self._membership.members():
            by_node.setdefault(member.registration.node, []).append(member)
        answers = await asyncio.gather(
            self._own(_of_node(request, _HERE)),
            *(self._of_workers(node, members, _of_node(request, node)) for node, members in by_node.items()),
        )
        return _merged(list(zip((_HERE, *by_node), answers, strict=True)), request.query.most_events)

    async def _own(self, query: wire.LogQuery) -> "_Answer":
        read_unix_ms = unix_ms()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                told = await self._here.read(query_from_wire(query))
        except TimeoutError:
            return f"{_OWN}: not within {ANSWER_TIMEOUT_S:g} s"
        except RachisError as error:
            return f"{_OWN}: {error}"
        return wire.ReadLogsResponse(
            events=events_to_wire(told.events), read_unix_ms=read_unix_ms, left_out=told.left_out
        )

    async def _of_workers(self, node: str, members: Sequence[Member], query: wire.LogQuery) -> "_Answer":
        why = "no worker of it serves"
        serving = [member for member in members if member.registration.address]
        for member in sorted(serving, key=lambda member: member.is_suspect)[:_MOST_ASKED]:
            try:
                return await self._client.logs(member.registration.address, query, ANSWER_TIMEOUT_S)
            except RachisError as error:
                why = str(error)
        return f"the logs of {node} cannot be read: {why}"


# Of a host; or the sentence that says why there is nothing of it.
_Answer = wire.ReadLogsResponse | str


def _of_node(request: admin.GetLogsRequest, node: str) -> wire.LogQuery:
    query = wire.LogQuery()
    query.CopyFrom(request.query)
    query.since_unix_ms = request.since_unix_ms.get(node, query.since_unix_ms)
    return query


def _merged(answers: Sequence[tuple[str, _Answer]], most_events: int) -> admin.GetLogsResponse:
    """With the node of each."""
    read = [(node, answer) for node, answer in answers if not isinstance(answer, str)]
    every = ((source, event) for source, (_, answer) in enumerate(read) for event in answer.events)
    told = last_of(every, most_events, lambda each: each[1].unix_ms, lambda each: each[1].ByteSize()).events
    for source, event in told:
        event.node = read[source][0]
    told_of = Counter(source for source, _ in told)
    return admin.GetLogsResponse(
        events=[event for _, event in told],
        missing=[answer for _, answer in answers if isinstance(answer, str)],
        sources=[
            admin.LogSource(
                node=node,
                read_unix_ms=answer.read_unix_ms,
                left_out=answer.left_out + len(answer.events) - told_of[source],
            )
            for source, (node, answer) in enumerate(read)
        ],
    )
