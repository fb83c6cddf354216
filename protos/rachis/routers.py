"""How a client reaches a service of several routers.

A lost connection makes it ask another one (`lost_routers`). What a router has answered, its refusals too, is for
whoever called (it sends `grpc-retry-pushback-ms: -1`), unless that wants it repeated (`retries`).
"""

import asyncio
import ipaddress
import json
from typing import Any

import grpc

from rachis import client_channel, conventions
from rachis.errors import ClosedError, InvalidInputError

# Of one message, either way.
MAX_MESSAGE_BYTES = 64 << 20
# What the sessions of one client keep of their messages together, to send it again.
KEPT_BYTES = 64 << 20
# After a connection was lost: a call made at once may be given to the same connection, while gRPC still closes it, and
# would count as a second router that is gone.
SETTLE_S = 0.1

_SERVICE_CONFIG: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}


def channel_options() -> list[tuple[str, int | str]]:
    return [
        *conventions.channel_options(MAX_MESSAGE_BYTES),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]


def channel(addresses: str, credentials: grpc.ChannelCredentials | None, server_name: str = "") -> grpc.aio.Channel:
    """server_name: in the routers' certificate, where the address has another.

    Raises InvalidInputError, and ClosedError where one was left before a fork.
    """
    asked, options = target(addresses), channel_options()
    if credentials is None:
        return client_channel.made(lambda: grpc.aio.insecure_channel(asked, options))
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return client_channel.made(lambda: grpc.aio.secure_channel(asked, credentials, options))


def target(addresses: str) -> str:
    """What gRPC calls the target: of `host:port`, or of several `ip:port` with commas between them.

    A name that stands for several routers needs no list: `dns:///name:port`. Raises InvalidInputError.
    """
    if not isinstance(addresses, str) or not addresses.strip():
        raise InvalidInputError.local(f"is {addresses!r}, and host:port", field="address")
    listed = [address.strip() for address in addresses.split(",")]
    if len(listed) == 1:
        return listed[0]
    versions = {_ip_version(address) for address in listed}
    if len(versions) > 1:
        raise InvalidInputError.local("several routers are either all IPv4 or all IPv6", field="address")
    return f"ipv{versions.pop()}:{','.join(listed)}"


def _ip_version(address: str) -> int:
    host, _, port = address.rpartition(":")
    try:
        int(port)
        return ipaddress.ip_address(host.strip("[]")).version
    except ValueError:
        raise InvalidInputError.local(
            f"{address!r} is not ip:port; several routers are given by ip:port each, or as one name, dns:///name:port",
            field="address",
        ) from None


async def connected(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """Whether a router can be reached within this time. Raises ClosedError where the client is closed meanwhile."""
    try:
        async with asyncio.timeout(timeout_s):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    except grpc.aio.UsageError:
        raise ClosedError from None
    return True


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection was lost, and no router said anything."""
    answered = error.trailing_metadata()
    is_answered = answered is not None and conventions.PUSHBACK in answered  # type: ignore[comparison-overlap]
    return error.code() is grpc.StatusCode.UNAVAILABLE and not is_answered
