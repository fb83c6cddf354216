"""How a client reaches a service of several routers, and what happens by itself when one of them is gone.

Only a lost connection is tried again, once, at another router, and only before anything of the answer has come: what a
router has answered, its refusals too, is for whoever called (it sends `grpc-retry-pushback-ms: -1`).
"""

import ipaddress
import json

import grpc
from rachis import wire as conventions

from cluster_core.errors import InvalidInputError

# Of one message, either way.
MAX_MESSAGE_BYTES = 64 << 20
# What one call may have sent and still be tried again. Sessions of one client keep their messages themselves, up to as
# many bytes together.
KEPT_BYTES = 64 << 20
# A call of one router and one more of another: a request that kills who takes it stops at the second.
TRIES = 2

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


def channel_options() -> list[tuple[str, int | str]]:
    return [
        *conventions.channel_options(MAX_MESSAGE_BYTES),
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


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection was lost, and no router said anything."""
    answered = error.trailing_metadata()
    is_answered = answered is not None and conventions.PUSHBACK in answered  # type: ignore[comparison-overlap]
    return error.code() is grpc.StatusCode.UNAVAILABLE and not is_answered
