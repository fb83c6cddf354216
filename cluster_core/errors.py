"""The one error tree. Each class names the gRPC status it becomes; `cluster_wire.calls` holds the adapter.

`ClientFault` is bad input and names the field; `OperatingFault` is expected of any cluster and says when to
try again. Anything else that is raised is a defect of ours and becomes INTERNAL.
"""

import asyncio
from collections.abc import Iterator
from types import TracebackType


class RachisError(Exception):
    """Base of all errors that a caller may see.

    status: name of the gRPC status. field: the input at fault, dotted, or empty.
    retry_after_ms: when trying again makes sense, or None.
    """

    status = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.retry_after_ms = retry_after_ms


class ClientFault(RachisError):
    """The caller sent something that can never work."""


class InvalidInputError(ClientFault):
    """A field is missing, malformed, or not one that this version knows."""

    status = "INVALID_ARGUMENT"


class OutOfRangeError(ClientFault):
    """Valid in itself, but more than this model or service takes."""

    status = "OUT_OF_RANGE"


class NotFoundError(ClientFault):
    """There is nothing by that name."""

    status = "NOT_FOUND"


class NotSupportedError(ClientFault):
    """This service or its model has no such thing."""

    status = "UNIMPLEMENTED"


class UnauthenticatedError(ClientFault):
    """Nobody whom the service knows. What of the key is wrong is not said."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(ClientFault):
    """The caller is known, and may not do this."""

    status = "PERMISSION_DENIED"


class OutOfOrderError(ClientFault):
    """Valid in itself, but not where this session stands or in its mode."""

    status = "FAILED_PRECONDITION"


class StaleRevisionError(ClientFault):
    """A revision that a newer one has already replaced: what is newer stands."""

    status = "ABORTED"


class WithdrawnError(RachisError):
    """The caller took the request back: nobody's fault."""

    status = "CANCELLED"


class OperatingFault(RachisError):
    """Something that happens to a cluster: it is counted, and mostly worth another try."""


class OverloadedError(OperatingFault):
    """There is no room now: a queue is full, or a limit is reached."""

    status = "RESOURCE_EXHAUSTED"


class UnavailableError(OperatingFault):
    """A part that the request needs is not there, or was lost under it."""

    status = "UNAVAILABLE"


class DeadlineError(OperatingFault):
    """It took longer than its caller, or a limit of the service, allows."""

    status = "DEADLINE_EXCEEDED"


class SlowReaderError(DeadlineError):
    """The client takes nothing of its answer: what is held for it is given to others."""


class JobFailedError(OperatingFault):
    """An engine could not carry out this one job, and goes on with the others."""

    status = "INTERNAL"


class PoisonedRequestError(OperatingFault):
    """Engines died while they worked on the request. It is not tried again: another one would die."""

    status = "INTERNAL"


class AdapterNotLoadedError(OperatingFault):
    """This worker cannot load the adapter of the request; another one may have it."""

    status = "NOT_FOUND"


class StaleGenerationError(OperatingFault):
    """The call was meant for an earlier start of this worker."""

    status = "FAILED_PRECONDITION"


class DrainingError(OperatingFault):
    """The worker takes nothing new, or gives a session back; another one may take it at once."""

    status = "ABORTED"


class ConfigError(ClientFault):
    """The configuration cannot be used as it is written."""

    status = "INVALID_ARGUMENT"


class StartError(OperatingFault):
    """A part of the service did not come up."""

    status = "UNAVAILABLE"


class Ungrouped:
    """Around a function with a TaskGroup: raises one of the errors it raises together, one of our tree if there is any.

    Not for a group whose errors a task handles to go on inside another group: before Python 3.13 a cancellation that
    comes at the same moment is lost (gh-116720). Nor do the frames of a TaskGroup keep, as they do before 3.13, all
    that was there when it failed or was cancelled, until the garbage collector finds it: a thousand sessions of a
    client that has gone would then stop everything else for a moment.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, BaseExceptionGroup | asyncio.CancelledError):
            return
        error.__traceback__ = None
        one = _one_of(error)
        came_of = one.__cause__, one.__context__, one.__suppress_context__
        try:
            raise one
        finally:
            one.__cause__, one.__context__, one.__suppress_context__ = came_of
            del one, error, frames, came_of


def _one_of(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if isinstance(leaf, RachisError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
