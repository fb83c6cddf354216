"""What a router answers over HTTP: `/metrics` for Prometheus, `/livez` and `/readyz` for who watches it, and pages.

Live: the router's loop answers. Who is not live for long is to be started again. Ready: requests are served. Who is not
ready gets no requests, and nothing is gained by starting it again. Both answer 200 or 503 with one sentence, and ask
nobody who they are. With `security.metrics_tls` all of it is encrypted.
"""

import asyncio
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

from cluster_core.ports import family_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
# A status and its sentence.
Said = tuple[HTTPStatus, str]

# The router's loop has not come to it even then.
LIVE_TIMEOUT_S = 2.0
# Of a client that does not send its request.
CLIENT_TIMEOUT_S = 10.0

# What each route says.
ROUTES = {
    "/metrics": "the figures of the router and its workers, for Prometheus",
    "/livez": "200 while the router's loop answers, else 503",
    "/readyz": "200 while requests are served, else 503 and why not",
}
_HANGS = (HTTPStatus.SERVICE_UNAVAILABLE, f"the router has not answered for {LIVE_TIMEOUT_S:g} s")


@dataclass(frozen=True, slots=True)
class ShownBy:
    """By what somebody who asks over HTTP shows who that is. authorization: as of the header, or made of `x-api-key`;
    None: there is neither; empty: there are several that differ. certificate: PEM, of the connection; None: none."""

    authorization: str | None = None
    certificate: bytes | None = None


def shown_by(http: BaseHTTPRequestHandler) -> ShownBy:
    """Of a request that has come, and so over a connection whose hands are shaken."""
    connection = http.connection
    shown = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
    certificate = ssl.DER_cert_to_PEM_cert(shown).encode() if shown else None
    keys = {f"Bearer {key}" for key in http.headers.get_all("x-api-key", [])}
    given = keys | set(http.headers.get_all("authorization", []))
    return ShownBy((given.pop() if len(given) == 1 else "") if given else None, certificate)


@dataclass(frozen=True, slots=True)
class Probes:
    """What is asked of the router's loop."""

    loop: asyncio.AbstractEventLoop
    # Called on the loop: why no request is served, or empty.
    not_ready: Callable[[], str]
    # Awaited on the loop: why somebody may not read the metrics. None: everybody may.
    scrape_refusal: Callable[[ShownBy], Awaitable[Said | None]] | None = None
    timeout_s: float = LIVE_TIMEOUT_S

    def live(self) -> Said:
        """Waits a bounded time."""
        return self._ask(self._live(), _HANGS)

    def ready(self) -> Said:
        """Waits a bounded time."""
        return self._ask(self._ready(), _HANGS)

    def refused(self, shown: ShownBy) -> Said | None:
        """Why the metrics are not told; None: they are. Waits a bounded time."""
        return self._ask(self.scrape_refusal(shown), _HANGS) if self.scrape_refusal is not None else None

    def _ask(self, question: Awaitable[T], otherwise: T) -> T:
        """otherwise: where the loop has not come to it."""
        asked = asyncio.run_coroutine_threadsafe(_awaited(question), self.loop)
        try:
            return asked.result(self.timeout_s)
        except TimeoutError:
            asked.cancel()
            return otherwise

    async def _live(self) -> Said:
        return HTTPStatus.OK, "the router answers"

    async def _ready(self) -> Said:
        reason = self.not_ready()
        return (HTTPStatus.SERVICE_UNAVAILABLE, reason) if reason else (HTTPStatus.OK, "requests are served")


async def _awaited(question: Awaitable[T]) -> T:
    return await question


class Pages(Protocol):
    """What is served beside metrics and probes, each request on a thread of its own."""

    def get(self, http: BaseHTTPRequestHandler) -> bool:
        """False: there is no such page, and nothing was answered."""
        ...

    def post(self, http: BaseHTTPRequestHandler) -> bool:
        """As `get`."""
        ...

    def close(self) -> None:
        """What still goes on ends."""
        ...


class ProbeServer:
    """Serves from its construction until `close`, one thread for each request. Raises OSError when it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        probes: Probes,
        pages: Pages | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """tls: asked, by one thread, for each connection; None: nothing is encrypted."""
        handler = type("_Handler", (_Handler,), {"registry": registry, "probes": probes, "pages": pages})
        self._pages = pages
        self._server = _Server(host, port, handler)
        self._server.tls = tls
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._pages is not None:
            self._pages.close()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # Who is being answered while it closes is not waited for.
    block_on_close = False
    tls: Callable[[], ssl.SSLContext] | None = None

    def __init__(self, host: str, port: int, handler: type["_Handler"]) -> None:
        self.address_family = family_of(host)
        super().__init__((host, port), handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, client = super().get_request()
        if self.tls is not None:
            # Hands are shaken by the request's own thread, in the time that a client has for its request.
            connection = self.tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that speaks no TLS, or does not trust the certificate, or goes away, is no defect."""
        error = sys.exception()
        logger.log(
            logging.DEBUG if isinstance(error, OSError) else logging.ERROR,
            "the request of %s was not answered", client_address, exc_info=error,
        )  # fmt: skip


class _Handler(MetricsHandler):
    timeout = CLIENT_TIMEOUT_S
    probes: Probes
    pages: Pages | None

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        match self.path.partition("?")[0]:
            case "/metrics":
                refused = self.probes.refused(shown_by(self))
                super().do_GET() if refused is None else self._say(*refused)
            case "/livez":
                self._say(*self.probes.live())
            case "/readyz":
                self._say(*self.probes.ready())
            case _:
                if self.pages is None or not self.pages.get(self):
                    *others, last = ROUTES
                    self._say(HTTPStatus.NOT_FOUND, f"there are {', '.join(others)} and {last}")

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        if self.pages is None or not self.pages.post(self):
            self._say(HTTPStatus.NOT_FOUND, "there is no such call")

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        body = f"{sentence}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
