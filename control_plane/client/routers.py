"""How a client reaches a service of several routers, and what happens by itself when one of them is gone.

Only a lost connection is tried again, once, at another router, and only before anything of the answer has come: what a
router has answered, its refusals too, is for whoever called (it sends `grpc-retry-pushback-ms: -1`).
"""

import ipaddress
import json
from collections.abc import Coroutine
from typing import Any

import grpc
from rachis import wire as conventions

from cluster_core.errors import InvalidInputError

# What one call may have sent and still be tried again. Sessions of one client keep their messages themselves, up to as
# many bytes together.
KEPT_BYTES = 64 << 20
# A call of one router and one more of another: a request that kills who takes it stops at the second.
TRIES = 2

# What gRPC says of a call that was lost under a write.
_BROKEN_WRITE = "Internal error from Core"

_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": "rachis.v1.RouterService", "method": "Generate"}],
            "retryPolicy": {
                "maxAttempts": TRIES,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}


def channel_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    return [
        *conventions.channel_options(max_message_bytes),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        ("grpc.per_rpc_retry_buffer_size", KEPT_BYTES),
    ]


def target(addresses: str) -> str:
    """What gRPC calls the target: of `host:port`, or of several `ip:port` with commas between them.

    A name that stands for several routers needs no list: `dns:///name:port`. Raises InvalidInputError.
    """
    listed = [address.strip() for address in addresses.split(",")]
    if len(listed) == 1:
        return listed[0]
    versions = {_ip_version(address) for address in listed}
    if len(versions) > 1:
        raise InvalidInputError("several routers are either all IPv4 or all IPv6", field="address")
    return f"ipv{versions.pop()}:{','.join(listed)}"


def _ip_version(address: str) -> int:
    host, _, port = address.rpartition(":")
    try:
        int(port)
        return ipaddress.ip_address(host.strip("[]")).version
    except ValueError:
        raise InvalidInputError(
            f"{address!r} is not ip:port; several routers are given by ip:port each, or as one name, dns:///name:port",
            field="address",
        ) from None


def are_several(addresses: str) -> bool:
    """Whether there may be another router where one is gone."""
    return "," in addresses or addresses.startswith("dns:")


def status_of(call: Any) -> grpc.aio.AioRpcError:
    """Of a call that has ended."""
    code, details, metadata = (_at_once(each()) for each in (call.code, call.details, call.trailing_metadata))
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing if metadata is None else metadata, details, None)


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection was lost, and no router said anything."""
    answered = error.trailing_metadata()
    is_answered = answered is not None and conventions.PUSHBACK in answered  # type: ignore[comparison-overlap]
    has_no_answer = error.code() is grpc.StatusCode.UNAVAILABLE or error.details() == _BROKEN_WRITE
    return has_no_answer and not is_answered


def told_truly(error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """The error; of a call that was lost under a write, which gRPC for Python calls INTERNAL, that it was lost."""
    if error.details() != _BROKEN_WRITE:
        return error
    nothing = grpc.aio.Metadata()
    sentence = "the connection to the router was lost"
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, sentence, None)


def _at_once(answer: Coroutine[Any, Any, Any]) -> Any:
    """What need not be waited for."""
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    answer.close()
    raise AssertionError("a call that has ended knows its status")
