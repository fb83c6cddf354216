"""gRPC conventions of every Rachis server and client: channel options, and the table from errors to statuses.

Bad input answers with the sentence of the error; an overload adds when to try again, both as the standard
`google.rpc.RetryInfo` detail and as the trailing metadata `retry-after-ms`. A client's channel that would try again by
itself is told not to (`grpc-retry-pushback-ms`): what was answered is repeated by whoever asked, or not at all.
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING
from typing import Any as Anything

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from cluster_core.errors import RachisError, SlowReaderError, WithdrawnError

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Anything, Anything]
else:
    Context = grpc.aio.ServicerContext

RETRY_AFTER = "retry-after-ms"
# gRPC's own: a negative number ends the retries of a client's channel.
PUSHBACK = "grpc-retry-pushback-ms"
_ABORT_TIMEOUT_S = 1.0
_DETAILS = "grpc-status-details-bin"


def channel_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    """Options of servers and clients alike: explicit message sizes, keepalive that notices a dead peer."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A port that is taken is an error, not a port to share with whoever has it.
        ("grpc.so_reuseport", 0),
        # Whoever was away is found within ten seconds after it is back: an attempt and a pause take five at most. gRPC
        # would pause for two minutes in the end.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # A host that is cut off says nothing: whoever calls it finds out within ten seconds.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
    ]


async def next_message(stream: Anything) -> Anything:
    """The next message of a stream that is read, at a server's context or a client's call; None once it is closed."""
    message = await stream.read()
    return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]  # missing in grpc-stubs


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


def status_code(error: RachisError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


def trailing_metadata(error: RachisError) -> tuple[tuple[str, str | bytes], ...]:
    """The details of an error in the two forms that clients read."""
    status = Status(code=status_code(error).value[0], message=str(error))
    metadata: list[tuple[str, str | bytes]] = [(PUSHBACK, "-1")]
    if error.field:
        violation = BadRequest.FieldViolation(field=error.field, description=str(error))
        status.details.append(_packed(BadRequest(field_violations=[violation])))
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
