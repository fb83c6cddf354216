"""Errors on the wire: the status of each class, and the details that clients read."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc._cython import cygrpc
from rachis import conventions, routers

from cluster_core import errors
from cluster_core.errors import InvalidInputError, OverloadedError, RachisError, StaleGenerationError, WithdrawnError
from cluster_sim.workloads.trace_lines import TraceError
from cluster_wire import calls, registry
from control_plane.fleet.adapters import NameTakenError
from control_plane.fleet.worker_client import (
    _ERRORS,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerLacksAdapterError,
    WorkerLeftError,
    WorkerLostError,
    WorkerStalledError,
    WorkerUnreachableError,
)


def all_classes(base: type[RachisError]) -> set[type[RachisError]]:
    return {base}.union(*(all_classes(child) for child in base.__subclasses__()))


EXPECTED: dict[type[RachisError], str] = {
    errors.RachisError: "INTERNAL",
    errors.ClientFault: "INTERNAL",
    errors.OperatingFault: "INTERNAL",
    errors.InvalidInputError: "INVALID_ARGUMENT",
    errors.OutOfRangeError: "OUT_OF_RANGE",
    errors.NotFoundError: "NOT_FOUND",
    errors.UnauthenticatedError: "UNAUTHENTICATED",
    errors.PermissionDeniedError: "PERMISSION_DENIED",
    errors.NotSupportedError: "UNIMPLEMENTED",
    errors.OutOfOrderError: "FAILED_PRECONDITION",
    errors.StaleRevisionError: "ABORTED",
    errors.WithdrawnError: "CANCELLED",
    errors.OverloadedError: "RESOURCE_EXHAUSTED",
    errors.UnavailableError: "UNAVAILABLE",
    errors.DeadlineError: "DEADLINE_EXCEEDED",
    errors.StaleGenerationError: "FAILED_PRECONDITION",
    errors.ConfigError: "INVALID_ARGUMENT",
    errors.StartError: "UNAVAILABLE",
    errors.DrainingError: "ABORTED",
    errors.AdapterNotLoadedError: "NOT_FOUND",
    NameTakenError: "INVALID_ARGUMENT",
    WorkerLacksAdapterError: "UNAVAILABLE",
    WorkerLostError: "UNAVAILABLE",
    WorkerDrainingError: "UNAVAILABLE",
    WorkerLeftError: "UNAVAILABLE",
    WorkerDiedError: "UNAVAILABLE",
    WorkerStalledError: "UNAVAILABLE",
    WorkerUnreachableError: "UNAVAILABLE",
    errors.SlowReaderError: "DEADLINE_EXCEEDED",
    errors.PoisonedRequestError: "INTERNAL",
    errors.JobFailedError: "INTERNAL",
    TraceError: "INVALID_ARGUMENT",
}


def test_the_table_names_every_class_of_the_error_tree() -> None:
    assert all_classes(RachisError) == set(EXPECTED)


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_error_becomes_its_status(kind: type[RachisError]) -> None:
    assert calls.status_code(kind("why")) is grpc.StatusCode[EXPECTED[kind]]


def test_every_channel_option_is_one_that_grpc_knows() -> None:
    """gRPC ignores what it does not know. Of keepalive that is not allowed, it ends idle channels."""
    library = Path(cygrpc.__file__).read_bytes()
    names = [name for name, _ in routers.channel_options()]
    assert [name for name in names if name.encode() not in library] == []
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in library


def details(error: RachisError) -> Status:
    packed = dict(calls.trailing_metadata(error))["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    return Status.FromString(packed)


@pytest.mark.parametrize(
    ("retry_ms", "seconds", "nanos"), [(0, 0, 0), (100, 0, 100_000_000), (12_345, 12, 345_000_000)]
)
def test_an_overload_says_when_to_try_again_in_both_forms(retry_ms: int, seconds: int, nanos: int) -> None:
    error = OverloadedError("full", retry_after_ms=retry_ms)

    [detail] = details(error).details
    retry = RetryInfo()
    assert detail.Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (seconds, nanos)
    assert dict(calls.trailing_metadata(error))["retry-after-ms"] == str(retry_ms)


def test_bad_input_names_its_field_in_the_details_and_the_message() -> None:
    error = InvalidInputError("must not be empty", field="prompt.text")

    status = details(error)
    [detail] = status.details
    bad = BadRequest()
    assert detail.Unpack(bad)
    [violation] = bad.field_violations
    assert (violation.field, violation.description) == ("prompt.text", "prompt.text: must not be empty")
    assert (status.code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], str(error))


def test_an_error_with_both_carries_both() -> None:
    status = details(OverloadedError("full", field="request", retry_after_ms=5))

    assert [detail.type_url.rpartition(".")[2] for detail in status.details] == ["BadRequest", "RetryInfo"]


def test_an_error_without_either_adds_only_that_no_channel_repeats_it() -> None:
    assert calls.trailing_metadata(StaleGenerationError("old")) == (("grpc-retry-pushback-ms", "-1"),)


def test_channels_bound_messages_in_both_directions() -> None:
    options = dict(conventions.channel_options(1234))

    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 1234


@pytest.mark.parametrize("code", ["UNAVAILABLE", "FAILED_PRECONDITION", "CANCELLED"])
def test_a_worker_that_does_not_serve_the_call_counts_as_lost(code: str) -> None:
    assert _ERRORS[grpc.StatusCode[code]] is WorkerLostError


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"])
def test_a_workers_refusal_keeps_its_status_through_the_router(code: str) -> None:
    status = grpc.StatusCode[code]

    assert calls.status_code(_ERRORS[status]("why")) is status


def test_registry_keys_of_a_service_do_not_meet_those_of_another() -> None:
    keys = [
        (registry.generation_key(service), registry.workers_key(service), registry.worker_key(service, "decode-0"))
        for service in ("svc-1", "svc-2")
    ]

    assert len({key for group in keys for key in group}) == 6
    assert keys[0] == ("rachis:{svc-1}:generation", "rachis:{svc-1}:workers", "rachis:{svc-1}:worker:decode-0")


async def test_a_write_to_a_client_that_is_gone_is_nobodys_fault() -> None:
    class Gone:
        async def write(self, _message: object) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    context: Any = Gone()
    with pytest.raises(WithdrawnError, match="the client is gone"):
        await calls.write(context, object())
