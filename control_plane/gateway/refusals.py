"""What a router refuses, as the exceptions that vLLM's handlers turn into the right body and status.

Bad input names the field, as vLLM's own does. What is not the client's fault says when to try again, in `Retry-After`.
"""

import math
from http import HTTPStatus

from rachis.errors import RachisError
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from cluster_wire.http_status import BAD_INPUT, OF_ACCESS, OF_CLUSTER

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
    if error.status in BAD_INPUT:
        field = error.field.removeprefix("sampling.") or None
        if field is not None and field.startswith(_COMPILED):
            # The compiler's sentence, which vLLM gives as it is.
            return VLLMValidationError(sentence.removeprefix(f"sampling.{field}: "))
        return VLLMValidationError(sentence, parameter=field)
    if error.status in OF_ACCESS:
        return AccessRefused(sentence, OF_ACCESS[error.status])
    if error.status in OF_CLUSTER:
        return RouterRefused(sentence, OF_CLUSTER[error.status], error.retry_after_ms or _RETRY_AFTER_MS)
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
