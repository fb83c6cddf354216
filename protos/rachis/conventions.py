"""What every gRPC channel and server of Rachis agrees on: channel options, and the metadata beside a refusal.

An overload says when to try again. A client's channel that would try again by itself is told not to
(`grpc-retry-pushback-ms`): what was answered is repeated by whoever asked, or not at all.
"""

from typing import Any

import grpc

# Of what a call ends with: when to try again; the input at fault, dotted, with what is no printable ASCII, and `%`, as
# in a URL.
RETRY_AFTER = "retry-after-ms"
FIELD = "rachis-field"
# gRPC's own: a negative number ends the retries of a client's channel.
PUSHBACK = "grpc-retry-pushback-ms"


def channel_options(max_message_bytes: int, *, share_port: bool = False) -> list[tuple[str, int | str]]:
    """Options of servers and clients alike: explicit message sizes, keepalive that notices a dead peer.

    share_port: of a server, with others that do so too.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Unless told otherwise a port that is taken is an error, not a port to share with whoever has it.
        ("grpc.so_reuseport", int(share_port)),
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


async def next_message(stream: Any) -> Any:
    """The next message of a stream that is read, at a server's context or a client's call; None once it is closed."""
    message = await stream.read()
    return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]  # missing in grpc-stubs
