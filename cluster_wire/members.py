"""By what the parts of a service know each other: keys and seals that they alone can make, from the service's secret.

A call brings a key, which nobody reads on its way (`worker_tls`). A registration has a seal, so that no router asks a
worker that whoever can write to Redis has made up. A worker without a secret serves everybody who reaches it.

A gateway calls a router for callers of its own. Of one who has shown it a certificate and brings no key it hands the
certificate on, which counts for nothing but beside the key of the service's parts.
"""

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from rachis.metadata_channel import NO_KEY, Metadata

from cluster_core.errors import UnauthenticatedError
from cluster_wire import calls
from cluster_wire.calls import Context
from cluster_wire.secret import SEAL_BYTES, Secret

SERVICE_KEY = "rachis-service-key"
# DER, of whom a gateway calls for.
_CALLER_CERTIFICATE = "rachis-caller-certificate-bin"

CallMetadata = Iterable[tuple[str, str | bytes]]
# Whether it lives may be asked by anybody, such as a load balancer.
_OPEN = "/grpc.health.v1.Health/"


def member_metadata(secret: Secret | None) -> Metadata:
    """What a call to a worker brings along."""
    return ((SERVICE_KEY, secret.service_key),) if secret is not None else ()


def caller_metadata(secret: Secret, certificate: bytes) -> Metadata:
    """What a gateway's call to a router brings along for whom it calls. certificate: DER, of that caller. A router that
    does not know what that is takes the caller for nobody."""
    return (*NO_KEY, *member_metadata(secret), (_CALLER_CERTIFICATE, certificate))


def caller_certificate(secret: Secret, metadata: CallMetadata) -> bytes | None:
    """DER, of whom a part of the service calls for; None: it calls for itself, or is no part."""
    found = [value for name, value in metadata if name == _CALLER_CERTIFICATE]
    if len(found) != 1 or not isinstance(found[0], bytes) or not _is_member(metadata, secret.service_key.encode()):
        return None
    return found[0]


def sealed(secret: Secret | None, data: bytes) -> bytes:
    """As it is written for other parts of the service."""
    return data if secret is None else secret.seal(data) + data


def unsealed(secret: Secret | None, written: bytes) -> bytes | None:
    """What was sealed; None: by nobody who has the secret."""
    if secret is None:
        return written
    seal, data = written[:SEAL_BYTES], written[SEAL_BYTES:]
    return data if hmac.compare_digest(seal, secret.seal(data)) else None


class MembersOnly(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Of a worker's server. What a stranger sends is not parsed."""

    def __init__(self, secret: Secret) -> None:
        self._key = secret.service_key.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN) or self._may(handler_call_details):
            return handler
        return calls.handler_maker(handler)(_refuse)

    def _may(self, details: grpc.HandlerCallDetails) -> bool:
        return _is_member(details.invocation_metadata or (), self._key)


def _is_member(metadata: CallMetadata, key: bytes) -> bool:
    given = [value for name, value in metadata if name == SERVICE_KEY]
    return len(given) == 1 and isinstance(given[0], str) and hmac.compare_digest(given[0].encode(), key)


async def _refuse(request: Any, context: Context) -> None:
    await calls.abort(context, UnauthenticatedError("this takes calls of the service's own parts alone"))
