"""What a router refuses, as the exceptions that vLLM's handlers turn into the right body and status.

Bad input names the field, as vLLM's own does. What is not the client's fault says when to try again, in `Retry-After`.
"""

import math
from http import HTTPStatus

from rachis.errors import RachisError
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

_BAD_INPUT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "UNIMPLEMENTED"})
_STATUS = {
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "CANCELLED": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}
_OF_ACCESS = {"UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED, "PERMISSION_DENIED": HTTPStatus.FORBIDDEN}
# Where the router does not say: it may be gone, and another one come.
_RETRY_AFTER_MS = 1000
_COMPILED = "structured_outputs."


class AccessRefused(GracefulHTTPError):
    """Who asks is not known, or may not do this."""


class RouterRefused(GracefulHTTPError):
    """A refusal that is not the client's fault."""

    def __init__(self, message: str, status: HTTPStatus, retry_after_ms: int) -> None:
        super().__init__(message, status)
        self.retry_after_ms = retry_after_ms


def as_vllm_error(error: RachisError) -> Exception:
    """What a router says, as vLLM would have raised it."""
    sentence = str(error)
    if error.status in _BAD_INPUT:
        field = error.field.removeprefix("sampling.") or None
        if field is not None and field.startswith(_COMPILED):
            # The compiler's sentence, which vLLM gives as it is.
            return VLLMValidationError(sentence.removeprefix(f"sampling.{field}: "))
        return VLLMValidationError(sentence, parameter=field)
    if error.status in _OF_ACCESS:
        return AccessRefused(sentence, _OF_ACCESS[error.status])
    if error.status in _STATUS:
        return RouterRefused(sentence, _STATUS[error.status], error.retry_after_ms or _RETRY_AFTER_MS)
    return EngineGenerateError(sentence)


def headers_of(error: Exception) -> dict[str, str]:
    """What an answer has beside its body."""
    if isinstance(error, AccessRefused) and error.http_status is HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if not isinstance(error, RouterRefused):
        return {}
    return {
        "Retry-After": str(math.ceil(error.retry_after_ms / 1000)),
        "Retry-After-Ms": str(error.retry_after_ms),
    }
