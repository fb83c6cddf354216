"""`rachis logs`: what all processes of a service have logged, in order of time."""

import asyncio
import json
from collections.abc import Iterable
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError
from cluster_core.event_log import LEVELS
from cluster_core.log_files import MOST_EVENTS, USUAL_EVENTS
from cluster_wire.log_messages import event_from_wire
from command_line import options
from command_line.log_follow import Following
from command_line.output import err, out, print_json
from command_line.router_admin import TIMEOUT_S

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
# What a router says, or what is said of it, that may be otherwise a moment later.
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


def register(app: typer.Typer) -> None:
    app.command("logs")(logs_command)


def logs_command(
    request: Annotated[
        str, typer.Option("--request", help="Of this request, or of the trace of this id; by default of all.")
    ] = "",
    level: Annotated[str, typer.Option(help=f"The least: {', '.join(LEVELS)}. By default all that is written.")] = "",
    last: Annotated[int, typer.Option(min=1, max=MOST_EVENTS, help="So many events, the latest.")] = USUAL_EVENTS,
    follow: Annotated[
        float, typer.Option(min=0, max=86_400, metavar="SECONDS", help="Go on for so long, or until Ctrl-C.")
    ] = 0,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """What the router, its gateways and the workers of all hosts have logged, in order of time."""
    if level and level.upper() not in LEVELS:
        raise ConfigError(f"must be one of {', '.join(LEVELS)}", field="--level")
    query = wire.LogQuery(request_id=request, level=level.upper(), most_events=last)
    asyncio.run(logs(options.admin_address(address), query, follow_s=follow, as_json=as_json))


async def logs(address: str, query: wire.LogQuery, *, follow_s: float, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        told = await client.admin.GetLogs(admin.GetLogsRequest(query=query), timeout=TIMEOUT_S)
        if as_json and not follow_s:
            print_json({"events": [event_of(event) for event in told.events], "missing": list(told.missing)})
            return
        _say(told.missing)
        if not told.events and not follow_s:
            out.print(nothing_found(query))
            return
        _show(told.events, as_json=as_json)
        if follow_s:
            await _follow(client, Following(query, told), follow_s, as_json=as_json)


async def _follow(client: AsyncClient, following: Following, follow_s: float, *, as_json: bool) -> None:
    until_s = monotonic_s() + follow_s
    while (left_s := until_s - monotonic_s()) > 0:
        await asyncio.sleep(min(following.pause_s, left_s))
        try:
            told = await client.admin.GetLogs(following.request(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _PASSING:
                raise
            _say(following.failed(error.details() or error.code().name))
            continue
        news = following.news(told)
        _say(news.sentences)
        _show(news.events, as_json=as_json)


def _say(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        err.print(sentence, markup=False)


def _show(events: Iterable[wire.LogEvent], *, as_json: bool) -> None:
    for event in events:
        if as_json:
            print(json.dumps(event_of(event)), flush=True)
        else:
            out.print(event_from_wire(event).as_text(), style=_STYLES.get(event.level), markup=False)


def event_of(event: wire.LogEvent) -> dict[str, Any]:
    """For `--json`."""
    told: dict[str, Any] = MessageToDict(event, preserving_proto_field_name=True)
    return {**told, "unix_ms": event.unix_ms}


def nothing_found(query: wire.LogQuery) -> str:
    """The sentence for who finds nothing."""
    about = f" of request {query.request_id}" if query.request_id else ""
    level = f" at {query.level} or above" if query.level else ""
    return f"nothing{about}{level} is in the logs; processes write what is at `log_level` or above"
