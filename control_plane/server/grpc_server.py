"""The gRPC server of a router: how large messages are, how many calls a connection has, who looks at a call first."""

from collections.abc import Callable

import grpc
from rachis import conventions

from cluster_configs.schema import RachisConfig
from cluster_core.errors import UnavailableError
from control_plane.access.door import Door
from control_plane.fleet.membership import Membership
from control_plane.intake.malformed_input import MOST_NUMBERS, MalformedInputInterceptor
from control_plane.model.limits import MOST_ENTRIES

# Above our limit and this much more gRPC itself refuses a message before it is received; below a sentence does.
_SENTENCE_BYTES = 1 << 20
# Calls of one connection at a time are bounded by what the router takes in all, and this many more.
_SPARE_STREAMS = 1024
# What a client may have on its way to a session that is not read. gRPC would widen it by measurement, to megabytes.
_STREAM_WINDOW_BYTES = 256 << 10
_FIXED_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", _STREAM_WINDOW_BYTES)]


def make_server(
    make: Callable[..., grpc.aio.Server], config: RachisConfig, membership: Membership, door: Door
) -> grpc.aio.Server:
    """make: as `grpc.aio.server`. Nothing is on it yet, and it listens nowhere."""
    section, limit_bytes = config.router, config.router.max_message_mib << 20
    streams = section.max_in_flight_requests + section.max_queued_requests + config.streaming.max_client_sessions
    return make(
        interceptors=[door, MalformedInputInterceptor(limit_bytes, lambda: _most_numbers(membership))],
        options=[
            *conventions.channel_options(limit_bytes + _SENTENCE_BYTES),
            ("grpc.max_concurrent_streams", streams + _SPARE_STREAMS),
            *_FIXED_WINDOW,
        ],
    )


def _most_numbers(membership: Membership) -> int:
    """Token ids in one message: as many as the model takes, where a worker has told its length."""
    try:
        return max(membership.served_model().max_model_len, MOST_ENTRIES)
    except UnavailableError:
        return MOST_NUMBERS
