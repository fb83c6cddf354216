"""What a service answers instead of what was asked for: one class for each gRPC status that means a thing to a caller.

Each is a `grpc.aio.AioRpcError` too, so that whoever knows gRPC catches what gRPC raises. `str(error)` is the service's
sentence.
"""

from typing import Any, ClassVar, Self
from urllib.parse import unquote

import grpc

from rachis.conventions import FIELD, RETRY_AFTER

_Code = grpc.StatusCode
# Why a client is as good as closed.
FORKED = "a client does not outlive a fork: make the first one in the child"


class ClosedError(RuntimeError):
    """The client is closed, or was while its answer was waited for; or it is from before a fork."""

    def __init__(self, why: str = "the client is closed") -> None:
        super().__init__(why)


class RachisError(grpc.aio.AioRpcError):
    """Base of all. Where it is raised itself, the status is none of those below."""

    CODE: ClassVar[grpc.StatusCode] = _Code.UNKNOWN

    @classmethod
    def local(cls, message: str, field: str = "") -> Self:
        """Of what this side has found before the service was asked."""
        ended = grpc.aio.Metadata((FIELD, field)) if field else grpc.aio.Metadata()
        return cls(cls.CODE, grpc.aio.Metadata(), ended, f"{field}: {message}" if field else message, None)

    def __str__(self) -> str:
        return self.details() or self.code().name

    @property
    def status(self) -> str:
        """Name of the gRPC status."""
        return self.code().name

    @property
    def field(self) -> str:
        """The input at fault, dotted, or empty."""
        return unquote(self._said(FIELD) or "")

    @property
    def retry_after_ms(self) -> int | None:
        """When trying again makes sense, where the service says so."""
        said = self._said(RETRY_AFTER)
        return int(said) if said else None

    def _said(self, key: str) -> str | None:
        said: Any = dict(self.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs, to the stubs not
        found: str | None = said.get(key)
        return found


class InvalidInputError(RachisError):
    """Can never work as it is; `field` says what of it."""

    CODE = _Code.INVALID_ARGUMENT


class OutOfRangeError(RachisError):
    """Valid in itself, but more than this model or service takes."""

    CODE = _Code.OUT_OF_RANGE


class NotFoundError(RachisError):
    CODE = _Code.NOT_FOUND


class NotSupportedError(RachisError):
    CODE = _Code.UNIMPLEMENTED


class UnauthenticatedError(RachisError):
    """The service knows no such key, or none was given. It does not say which."""

    CODE = _Code.UNAUTHENTICATED


class PermissionDeniedError(RachisError):
    """The key is known, and may not do this."""

    CODE = _Code.PERMISSION_DENIED


class OutOfOrderError(RachisError):
    """Valid in itself, but not where this session stands or in its mode."""

    CODE = _Code.FAILED_PRECONDITION


class OverloadedError(RachisError):
    """The service has enough to do; `retry_after_ms` says when to come back."""

    CODE = _Code.RESOURCE_EXHAUSTED


class UnavailableError(RachisError):
    """The service cannot do it now, or no router could be reached."""

    CODE = _Code.UNAVAILABLE


class DeadlineError(RachisError):
    """The request took longer than it might, or its client took nothing of the answer."""

    CODE = _Code.DEADLINE_EXCEEDED


class WithdrawnError(RachisError):
    """The request was cancelled."""

    CODE = _Code.CANCELLED


class FailedError(RachisError):
    """The service could not carry it out, by no fault of the request that it knows of."""

    CODE = _Code.INTERNAL


_BY_CODE = {kind.CODE: kind for kind in RachisError.__subclasses__()}


def typed(error: grpc.aio.AioRpcError) -> RachisError:
    """The same, as one of these."""
    if isinstance(error, RachisError):
        return error
    kind = _BY_CODE.get(error.code(), RachisError)
    first, last = (grpc.aio.Metadata(*(told or ())) for told in (error.initial_metadata(), error.trailing_metadata()))
    return kind(error.code(), first, last, error.details(), error.debug_error_string())
