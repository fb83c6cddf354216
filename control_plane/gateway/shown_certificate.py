"""The certificate that a connection has shown, for whoever answers its requests: uvicorn does not hand it on.

It is put into the state of each request's scope, which nothing that a client sends gets into. A WebSocket has it from
the request that opened it. TLS has verified it by then (`--ssl-ca-certs`).
"""

import asyncio
from typing import Any

from control_plane.gateway.bounded_peer import BoundedPeerProtocol

_STATE, _CERTIFICATE = "state", "rachis.client_certificate"


class CertificateProtocol(BoundedPeerProtocol):
    """The server's protocol, and this beside it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        tls: Any = transport.get_extra_info("ssl_object")
        shown = tls.getpeercert(binary_form=True) if tls is not None else None
        # Of this connection: the application's own is another mapping.
        self.app_state = {**self.app_state, _CERTIFICATE: shown or b""}


def shown_certificate(scope: Any) -> bytes:
    """DER; empty: none was asked for, or shown."""
    found: bytes = scope.get(_STATE, {}).get(_CERTIFICATE, b"")
    return found
