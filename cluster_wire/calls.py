"""How a server's call writes and ends: the status and the details of each error.

Bad input answers with the sentence of the error and names the field; an overload adds when to try again. Both come as
the standard details `google.rpc.BadRequest` and `google.rpc.RetryInfo` and, for who does not know those, as trailing
metadata (`rachis.conventions`).
"""

import asyncio
import contextlib
import string
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any as Anything
from urllib.parse import quote

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from rachis.conventions import FIELD, PUSHBACK, RETRY_AFTER

from cluster_core.errors import RachisError, SlowReaderError, WithdrawnError

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Anything, Anything]
else:
    Context = grpc.aio.ServicerContext

_ABORT_TIMEOUT_S = 1.0
_DETAILS = "grpc-status-details-bin"
_PLAIN = string.punctuation.replace("%", "") + " "


async def begin(context: Context) -> None:
    """Sends the headers of an answer, where its first message may be given up on its way.

    Otherwise gRPC (1.85) sends them again with the status, which fails, and the caller waits for as long as it may.
    """
    await context.send_initial_metadata(())


async def write(context: Context, message: Anything, timeout_s: float | None = None) -> None:
    """Writes to a client's stream, and waits while its window is full.

    Raises WithdrawnError when the client is gone, whose cancelling is on its way, and SlowReaderError when it has taken
    nothing for so long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except grpc.aio.InternalError:
        raise WithdrawnError("the client is gone") from None
    except TimeoutError:
        raise SlowReaderError(
            f"the client took nothing of its answer for {timeout_s:g} s; see router.send_timeout_s"
        ) from None


async def abort(context: Context, error: RachisError) -> None:
    """Ends the call with what the error says.

    The status waits behind what the client has not taken. One that takes nothing gets it when it does: the call is left
    to gRPC then, which holds nothing of ours.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            await context.abort(status_code(error), str(error), trailing_metadata(error))


def handler_maker(handler: Anything) -> Callable[..., Anything]:
    """What makes another handler of the same kind. Ours have no streams that are answered with one message."""
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler
    return grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler


def without_frames(aborted: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """gRPC keeps it with the call, and its frames keep the call: a refused message would be there, all its megabytes,
    until the garbage collector comes."""
    aborted.__context__ = None
    return aborted.with_traceback(None)


def status_code(error: RachisError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


def trailing_metadata(error: RachisError) -> tuple[tuple[str, str | bytes], ...]:
    """The details of an error in the two forms that clients read."""
    status = Status(code=status_code(error).value[0], message=str(error))
    metadata: list[tuple[str, str | bytes]] = [(PUSHBACK, "-1")]
    if error.field:
        violation = BadRequest.FieldViolation(field=error.field, description=str(error))
        status.details.append(_packed(BadRequest(field_violations=[violation])))
        metadata.append((FIELD, quote(error.field, safe=_PLAIN)))
    if error.retry_after_ms is not None:
        delay = Duration(seconds=error.retry_after_ms // 1000, nanos=error.retry_after_ms % 1000 * 1_000_000)
        status.details.append(_packed(RetryInfo(retry_delay=delay)))
        metadata.append((RETRY_AFTER, str(error.retry_after_ms)))
    if status.details:
        metadata.append((_DETAILS, status.SerializeToString()))
    return tuple(metadata)


def _packed(message: BadRequest | RetryInfo) -> Any:
    detail = Any()
    detail.Pack(message)
    return detail
