"""What a router refuses, as the exceptions that vLLM's handlers turn into the right body and status.

Bad input names the field, as vLLM's own does. What is not the client's fault says when to try again, in `Retry-After`.
"""

import math
from http import HTTPStatus
from typing import Any

import grpc
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from rachis import wire as conventions
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

_BAD_INPUT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "UNIMPLEMENTED"})
_STATUS = {
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "CANCELLED": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}
_DETAILS = "grpc-status-details-bin"
# Where the router does not say: it may be gone, and another one come.
_RETRY_AFTER_MS = 1000
_COMPILED = "structured_outputs."


class RouterRefused(GracefulHTTPError):
    """A refusal that is not the client's fault."""

    def __init__(self, message: str, status: HTTPStatus, retry_after_ms: int) -> None:
        super().__init__(message, status)
        self.retry_after_ms = retry_after_ms


def as_vllm_error(error: grpc.aio.AioRpcError) -> Exception:
    """The router's status as vLLM would have raised it."""
    name, sentence = error.code().name, error.details() or error.code().name
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs, to the stubs not
    if name in _BAD_INPUT:
        field = _field(trailing.get(_DETAILS))
        if field is not None and field.startswith(_COMPILED):
            # The compiler's sentence, which vLLM gives as it is.
            return VLLMValidationError(sentence.removeprefix(f"sampling.{field}: "))
        return VLLMValidationError(sentence, parameter=field)
    if name in _STATUS:
        return RouterRefused(sentence, _STATUS[name], int(trailing.get(conventions.RETRY_AFTER) or _RETRY_AFTER_MS))
    return EngineGenerateError(sentence)


def headers_of(error: Exception) -> dict[str, str]:
    """What an answer has beside its body."""
    if not isinstance(error, RouterRefused):
        return {}
    return {
        "Retry-After": str(math.ceil(error.retry_after_ms / 1000)),
        "Retry-After-Ms": str(error.retry_after_ms),
    }


def _field(details: bytes | None) -> str | None:
    for detail in Status.FromString(details).details if details else ():
        bad = BadRequest()
        if detail.Unpack(bad) and bad.field_violations:
            return bad.field_violations[0].field.removeprefix("sampling.")
    return None
