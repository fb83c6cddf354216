"""What a service refuses, as a client's exceptions."""

import pickle

import grpc
import pytest
from rachis import errors
from rachis.errors import InvalidInputError, OverloadedError, RachisError, typed

from cluster_core import errors as service
from cluster_wire.calls import trailing_metadata


def as_raised(error: service.RachisError) -> RachisError:
    """As it reaches a client."""
    code = grpc.StatusCode[error.status]
    return typed(
        grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing_metadata(error)), str(error), None)
    )


@pytest.mark.parametrize(
    "kind",
    [
        "InvalidInputError",
        "OutOfRangeError",
        "NotFoundError",
        "NotSupportedError",
        "OutOfOrderError",
        "OverloadedError",
        "UnavailableError",
        "DeadlineError",
        "WithdrawnError",
    ],
)
def test_an_error_has_the_same_name_on_both_sides(kind: str) -> None:
    raised = as_raised(getattr(service, kind)("why"))
    assert type(raised) is getattr(errors, kind)
    assert (str(raised), raised.field, raised.retry_after_ms) == ("why", "", None)


@pytest.mark.parametrize("field", ["sampling.top_p", "context[3].text", "größe 100%", "a\nb", "x" * 300])
def test_a_field_comes_as_it_was_named(field: str) -> None:
    raised = as_raised(service.InvalidInputError("is bad", field=field))
    assert (raised.field, str(raised)) == (field, f"{field}: is bad")


def test_an_overload_says_when_to_come_back() -> None:
    raised = as_raised(service.OverloadedError("full", retry_after_ms=1500))
    assert isinstance(raised, OverloadedError)
    assert raised.retry_after_ms == 1500


def test_a_defect_of_the_service_and_a_status_nobody_expects_are_told_apart() -> None:
    assert type(as_raised(service.JobFailedError("why"))) is errors.FailedError
    assert type(as_raised(service.DrainingError("why"))) is RachisError


def test_who_knows_grpc_catches_what_grpc_raises() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        raise as_raised(service.InvalidInputError("is bad"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert typed(caught.value) is caught.value


def test_what_this_side_finds_looks_the_same() -> None:
    raised = InvalidInputError.local("is bad", field="address")
    assert (raised.status, raised.field, str(raised)) == ("INVALID_ARGUMENT", "address", "address: is bad")


def test_an_error_can_go_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(as_raised(service.OverloadedError("full", field="n", retry_after_ms=7))))
    assert (type(again), str(again), again.field, again.retry_after_ms) == (OverloadedError, "n: full", "n", 7)
