"""The table between engine types and messages leaves out no field, and carries each there and back."""

import dataclasses
import inspect
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import count
from types import UnionType
from typing import Any

import pytest
from google.protobuf.message import Message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core import engine_jobs, engine_reports
from cluster_core.engine_jobs import EngineJob, EngineOutput, FinishReason, SamplingSpec, SessionEvent, SessionEventKind
from cluster_core.engine_reports import EngineLoad, EngineStatus, PrefixClaimChange, PrefixClaims
from worker_runtime.wire_conversion import carried_by, from_wire, to_wire
from worker_runtime.wire_table import ENUMS, ROWS, Row

OURS = [
    kind
    for module in (engine_jobs, engine_reports)
    for kind in vars(module).values()
    if inspect.isclass(kind) and kind.__module__ == module.__name__
]
MESSAGES = {
    name: getattr(module, name) for module in (generation, wire) for name in module.DESCRIPTOR.message_types_by_name
}

# Of ours, what no row carries.
OTHER_FIELDS = {
    # The registration has them; they are set once, when the engine has started.
    "EngineInfo.block_size_tokens",
    "EngineInfo.max_running_requests",
    # The registration has them, renewed as often as it is.
    "EngineStatus.costs",
    "EngineCounters.cacheable_requests",
    "EngineCounters.stored_blocks",
    # How long the call itself waits still, which gRPC knows.
    "EngineJob.deadline_s",
    # It is one of the request's names.
    "EngineJob.traceparent",
    # A lease travels in PrefillResponse, with the name of the worker; what came of its pull is DecodeStarted.
    "EngineOutput.lease",
    "EngineOutput.handoff",
}
# Many keys: they travel packed, as `claims_to_wire` and `kv_transfer.claims.claims` say.
PACKED = {PrefixClaims, PrefixClaimChange}
# Messages that are no report of an engine.
OTHER_MESSAGES = {
    # What a client sends, and what the router makes of an answer.
    *("ChatMessage", "ChatMessages", "TokenIds", "PromptInput", "Usage", "Timings", "Route", "Completion"),
    # For logs and spans.
    "RequestNames",
    # What a worker says of itself; `worker_runtime.host` writes it.
    "WorkerRegistration",
    # A list of one of the table's.
    "HottestPrefixes",
    # The envelopes of streams, and a session's input.
    *("PrefillSessionRequest", "PrefillSessionResponse", "DecodeResponse"),
    *("PrefillSessionAppend", "PrefillSessionUpdate", "PrefillSessionFinish"),
    # Calls about a worker.
    *("ReleaseHandoffRequest", "ReleaseHandoffResponse", "GetWorkerStatusRequest"),
    *("SetDrainingRequest", "SetDrainingResponse", "HandOverRequest", "HandOverResponse"),
    *("PrepareAdapterRequest", "PrepareAdapterResponse", "DropAdapterRequest", "DropAdapterResponse"),
    # Logs, which are no report of an engine; `cluster_wire.log_messages` carries them.
    *("LogQuery", "LogEvent", "ReadLogsRequest", "ReadLogsResponse"),
    # Between routers.
    *("RouterLoads", "WorkerShare", "TenantLine", "DecodeShare"),
    # A router's stream of outputs, in columns.
    *("StreamOutputsRequest", "StreamOutputsResponse", "StepEvent"),
    # Packed keys.
    *("ClaimBatch", "ClaimSnapshot", "AccessBatch", "GetPrefixClaimsRequest", "GetPrefixClaimsResponse"),
}


def left_out(rows: Iterable[Row]) -> set[str]:
    """Fields on either side that the rows neither carry nor are given."""
    rows = list(rows)
    ours = {f"{row.ours.__name__}.{field.name}" for row in rows for field in dataclasses.fields(row.ours)}
    ours -= {f"{row.ours.__name__}.{each.ours}" for row in rows for each in carried_by(row)}
    theirs = set()
    for row in rows:
        covered = row.given | {each.theirs for each in carried_by(row)}
        theirs |= {f"{row.message.__name__}.{field.name}" for field in row.message.DESCRIPTOR.fields} - {
            f"{row.message.__name__}.{name}" for name in covered
        }
    return ours | theirs


def test_no_field_of_ours_or_of_a_message_is_left_out() -> None:
    assert left_out(ROWS) == OTHER_FIELDS


def test_a_new_field_of_a_report_is_noticed() -> None:
    grown = dataclasses.make_dataclass("GrownLoad", [("paused_requests", int, 0)], bases=(EngineLoad,), frozen=True)

    assert left_out([Row(grown, wire.WorkerLoad, given=frozenset({"active_calls"}))]) == {"GrownLoad.paused_requests"}


def test_a_new_field_of_a_message_is_noticed() -> None:
    kept = [field for field in dataclasses.fields(EngineLoad) if field.name != "free_blocks"]
    shrunk = dataclasses.make_dataclass("ShrunkLoad", [(field.name, int, 0) for field in kept])

    found = left_out([Row(shrunk, wire.WorkerLoad, given=frozenset({"active_calls"}))])

    assert found == {"WorkerLoad.free_blocks"}


def test_every_type_of_the_engine_protocol_and_every_message_has_its_row() -> None:
    kinds = {kind for kind in OURS if dataclasses.is_dataclass(kind)}
    assert kinds - {row.ours for row in ROWS} == PACKED
    assert MESSAGES.keys() - {row.message.__name__ for row in ROWS} == OTHER_MESSAGES


def test_no_row_is_there_twice_or_names_a_field_that_is_none() -> None:
    assert len({(row.ours, row.message) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        theirs = {field.name for field in row.message.DESCRIPTOR.fields}
        assert row.given <= theirs, row
        assert set(row.pairs.values()) <= theirs - row.given, row
        assert row.pairs.keys() <= {field.name for field in dataclasses.fields(row.ours)}, row


def test_every_word_of_the_engine_has_one_word_on_the_wire() -> None:
    assert ENUMS.keys() == {kind for kind in OURS if issubclass(kind, Enum)}
    for ours, numbers in ENUMS.items():
        theirs = getattr(generation, ours.__name__)
        assert set(numbers) == set(ours)
        assert sorted(numbers.values()) == [number for number in sorted(theirs.values()) if number]
        assert all(theirs.Name(number).endswith(f"_{each.name}") for each, number in numbers.items())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.ours.__name__}-{row.message.__name__}")
def test_what_is_carried_comes_back_as_it_was(row: Row) -> None:
    report = example(row.ours, count(1))
    message = to_wire(report, row.message)
    names = [each.ours for each in carried_by(row)]
    rest = {each.name: getattr(report, each.name) for each in dataclasses.fields(row.ours) if each.name not in names}

    assert without_other_fields(from_wire(message, row.ours, **rest)) == without_other_fields(report)
    # What is given takes the place of what is carried, and alone fills the rest.
    set_fields = {descriptor.name for descriptor, _ in message.ListFields()}
    assert set_fields == {each.theirs for each in carried_by(row)}


def test_seconds_become_milliseconds_where_the_names_say_so() -> None:
    event = SessionEvent(SessionEventKind.RESUMED, at_s=0.25, tokens=3)

    assert to_wire(event, generation.SessionEvent).at_ms == 250


def test_what_is_given_goes_before_what_is_carried() -> None:
    output = EngineOutput((7,), "x", finish_reason=FinishReason.STOP)

    end = to_wire(output, wire.DecodeEnd, completion_tokens=3, finish_reason=generation.FINISH_REASON_LENGTH)
    job = from_wire(wire.DecodeRequest(request_id="r", priority=3), EngineJob, priority=4)

    assert (end.finish_reason, end.completion_tokens) == (generation.FINISH_REASON_LENGTH, 3)
    assert job.priority == 4


def test_what_is_none_is_absent_and_what_is_absent_is_our_default() -> None:
    message = to_wire(EngineStatus(), wire.GetWorkerStatusResponse)
    assert (message.HasField("load"), message.HasField("tiers")) == (True, False)
    assert from_wire(message, EngineStatus) == EngineStatus()

    job = from_wire(wire.DecodeRequest(request_id="r"), EngineJob)
    assert (job.pull, job.emitted, job.sampling) == (None, None, SamplingSpec())


def test_what_has_no_row_is_not_converted() -> None:
    with pytest.raises(KeyError):
        to_wire(EngineLoad(), wire.WorkerCounters)


def example(hint: Any, numbers: "count[int]") -> Any:
    """A value of that type, no two numbers in it alike and nothing in it empty or a default."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return example(next(each for each in typing.get_args(hint) if each is not type(None)), numbers)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{field.name: example(hints[field.name], numbers) for field in dataclasses.fields(hint)})  # type: ignore[operator]
    if typing.get_origin(hint) is tuple:
        return tuple(example(typing.get_args(hint)[0], numbers) for _ in range(2))
    if typing.get_origin(hint) is not None and issubclass(typing.get_origin(hint), Mapping):
        key, value = typing.get_args(hint)
        return {key(next(numbers)): example(value, numbers)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return list(hint)[-1]
    if hint is bool:
        return True
    if hint is str:
        return f"text {next(numbers)}"
    if hint is bytes:
        return b"bytes %d" % next(numbers)
    return float(next(numbers)) / 4 if hint is float else next(numbers)


def without_other_fields(report: Any) -> Any:
    """With reports inside it as far as their own rows carry them."""
    if isinstance(report, tuple):
        return tuple(map(without_other_fields, report))
    if not dataclasses.is_dataclass(report) or isinstance(report, type):
        return report
    kind = type(report).__name__
    return {
        field.name: without_other_fields(getattr(report, field.name))
        for field in dataclasses.fields(report)
        if f"{kind}.{field.name}" not in OTHER_FIELDS
    }


def test_messages_are_found_by_their_names() -> None:
    assert all(issubclass(each, Message) for each in MESSAGES.values())
