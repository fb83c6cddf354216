"""`rachis trace`: where the time of a request went, a bar for each stage, from the router's memory."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from command_line import options
from command_line.output import made_table, out, print_json
from command_line.router_admin import TIMEOUT_S

_BAR_CHARACTERS = 40


def register(app: typer.Typer) -> None:
    app.command("trace")(trace_command)


def trace_command(
    request_id: Annotated[
        str, typer.Argument(help="Of a request, its beginning, or the id of a trace; by default the latest request.")
    ] = "",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Where the time of a request went that runs, or ended of late: a bar for each stage."""
    asyncio.run(trace(options.admin_address(address), request_id, as_json=as_json))


async def trace(address: str, request_id: str, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        told = await client.admin.GetTrace(admin.GetTraceRequest(request_id=request_id), timeout=TIMEOUT_S)
    found = trace_of(told)
    if as_json:
        print_json(found)
        return
    out.print(
        escape(f"{found['kind']} {found['request_id']}, {found['outcome'] or 'running'}, trace {found['trace_id']}")
    )
    for answer in (found, *found["further_choices"]):
        out.print(answer_view(answer))


def trace_of(told: admin.GetTraceResponse) -> dict[str, Any]:
    """For `--json`."""
    return {
        "request_id": told.request_id,
        "trace_id": told.trace_id,
        "kind": told.kind,
        "outcome": told.outcome or None,
        "arrived_unix_s": told.arrived_unix_s,
        "exported": told.exported,
        **_answer_of(told.answer),
        "further_choices": [_answer_of(choice) for choice in told.further_choices],
    }


def _answer_of(answer: admin.AnswerTrace) -> dict[str, Any]:
    told: dict[str, Any] = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return told


def bar(start_ms: float, duration_ms: float, whole_ms: float) -> str:
    """Of one stage, at its place in the whole."""
    if whole_ms <= 0:
        return ""
    first = min(_BAR_CHARACTERS - 1, int(start_ms / whole_ms * _BAR_CHARACTERS))
    length = max(1, round(duration_ms / whole_ms * _BAR_CHARACTERS))
    return " " * first + "█" * min(length, _BAR_CHARACTERS - first)


def answer_view(answer: Mapping[str, Any]) -> Group:
    """One answer of what `trace_of` tells: a bar for each stage, and what happened."""
    whole_ms = answer["end_to_end_ms"]
    rows = [
        (
            stage["name"],
            stage["worker_id"] or "-",
            f"{stage['duration_ms']:.1f}",
            bar(stage["start_ms"], stage["duration_ms"], whole_ms),
        )
        for stage in answer["stages"]
    ]
    ttft_ms = answer.get("ttft_ms")
    first = f", first token after {ttft_ms:.1f} ms" if ttft_ms is not None else ""
    events = (Text(f"{event['at_ms']:.1f} ms {event['name']} {event['detail']}") for event in answer["events"])
    table = made_table("", ("stage", "worker", "ms", ""), rows)
    return Group(table, Text(f"{whole_ms:.1f} ms in all{first}"), *events)
