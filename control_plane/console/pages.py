"""What the console answers over HTTP: its files, and calls of the admin API, on threads of the endpoint for metrics.

GET  /, /static/...      the page, for everybody: there is nothing of the service in it
POST /api/METHOD         a call of that name, in JSON; one that tells how it goes answers with server-sent events
"""

import asyncio
import queue
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from google.protobuf.message import Message

from cluster_core.bounded_read import read_within
from cluster_core.errors import DeadlineError, InvalidInputError
from cluster_wire.http_status import http_status
from control_plane.console.admin_calls import METHODS, AdminCalls, Caller, Refused
from control_plane.console.guards import JSON, refusal, refusal_of_host
from control_plane.console.json_calls import error_json, is_streamed, json_of, request_of
from control_plane.console.static_files import SECURITY_HEADERS, static_files
from control_plane.console.streams import MOST_STREAMS, Stream, Streams, TooManyStreamsError
from control_plane.metrics.probe_server import shown_by

# What each route says; who may call what stands in `control_plane.access.roles`.
ROUTES = {
    "/": "the console's page",
    "/static/{file}": "what the page is made of",
    "/api/{call}": "a call of the admin API, as a POST in JSON",
}
_API = "/api/"
MOST_BODY_BYTES = 64 << 10
# Calls that are answered at one time, and how long each may take.
MOST_CALLS = 32
CALL_TIMEOUT_S = 10.0
# A browser that takes nothing for so long is gone, or as good as that; what lies in between is bounded, too.
SEND_TIMEOUT_S = 5.0
# In which a body has to come.
BODY_TIMEOUT_S = 10.0
_SEND_BUFFER_BYTES = 64 << 10
# Of a stream that has nothing to tell: whether anybody still reads.
_QUIET_S = 10.0


class ConsolePages:
    """Of one router, whose loop runs. `close` ends the streams. is_local: administration is on loopback, and calls of
    other hosts are not taken here either."""

    def __init__(
        self,
        calls: AdminCalls,
        loop: asyncio.AbstractEventLoop,
        most_streams: int = MOST_STREAMS,
        *,
        is_local: bool = True,
    ) -> None:
        self._calls = calls
        self._loop = loop
        self._is_local = is_local
        self._files = static_files()
        self._room = threading.BoundedSemaphore(MOST_CALLS)
        self.streams = Streams(loop, most_streams)

    def close(self) -> None:
        self.streams.close()

    def get(self, http: BaseHTTPRequestHandler) -> bool:
        """False: there is no such page."""
        file = self._files.get(http.path.partition("?")[0])
        if file is not None:
            _send(http, HTTPStatus.OK, file.content_type, file.body)
        return file is not None

    def post(self, http: BaseHTTPRequestHandler) -> bool:
        """As `get`, for calls."""
        path = http.path.partition("?")[0]
        name = path.removeprefix(_API)
        if not path.startswith(_API) or name not in METHODS:
            return False
        with suppress(OSError):
            # Who has asked may be gone.
            self._called(http, name)
        return True

    def _called(self, http: BaseHTTPRequestHandler, name: str) -> None:
        """Raises OSError."""
        why = self._why_not(http)
        if why:
            _fail(http, "PERMISSION_DENIED", why)
            return
        try:
            request = request_of(name, _body(http))
        except (InvalidInputError, DeadlineError) as error:
            _fail(http, error.status, str(error))
            return
        address, port = http.client_address[:2]
        caller = Caller(shown_by(http), f"{'ipv6' if ':' in address else 'ipv4'}:{address}:{port}")
        answers = self._calls.answers(name, request, caller)
        self._stream(http, answers) if is_streamed(name) else self._answer(http, answers)

    def _why_not(self, http: BaseHTTPRequestHandler) -> str:
        is_open = self._calls.is_open
        peer, own = http.client_address[0], http.connection.getsockname()[0]
        is_encrypted = isinstance(http.connection, ssl.SSLSocket)
        why = refusal_of_host(peer, own, is_open=is_open, is_encrypted=is_encrypted, is_local=self._is_local)
        if why:
            return why
        return refusal({name.lower(): value for name, value in http.headers.items()}, is_open=is_open)

    def _answer(self, http: BaseHTTPRequestHandler, answers: AsyncGenerator[Message, None]) -> None:
        if not self._room.acquire(blocking=False):
            _fail(http, "RESOURCE_EXHAUSTED", f"{MOST_CALLS} calls are being answered, and no more at a time")
            return
        try:
            asked = asyncio.run_coroutine_threadsafe(_only(answers), self._loop)
            try:
                message = asked.result(CALL_TIMEOUT_S)
            except TimeoutError:
                asked.cancel()
                _fail(http, "DEADLINE_EXCEEDED", f"the router has not answered for {CALL_TIMEOUT_S:g} s")
            except Refused as refused:
                _fail(http, refused.status, refused.sentence)
            else:
                _send(http, HTTPStatus.OK, JSON, json_of(message).encode())
        finally:
            self._room.release()

    def _stream(self, http: BaseHTTPRequestHandler, answers: AsyncGenerator[Message, None]) -> None:
        http.close_connection = True
        try:
            with self.streams.opened(answers) as stream:
                try:
                    _relay(http, stream)
                except TimeoutError:
                    stream.is_slow = True
        except TooManyStreamsError:
            _fail(http, "RESOURCE_EXHAUSTED", "as many consoles look at this router as may: close one, or try again")


def _relay(http: BaseHTTPRequestHandler, stream: Stream) -> None:
    """The status is that of the first message. Raises OSError."""
    told = _next(stream)
    if isinstance(told, Refused):
        _fail(http, told.status, told.sentence)
        return
    connection: socket.socket = http.connection
    connection.settimeout(SEND_TIMEOUT_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    _head(http, HTTPStatus.OK, {"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    while told is not None and not stream.is_slow:
        http.wfile.write(_event(told))
        if isinstance(told, Refused):
            return
        told = _next(stream)


def _next(stream: Stream) -> Any:
    """An empty text: nothing has come for a while."""
    try:
        return stream.next(_QUIET_S)
    except queue.Empty:
        return ""


def _event(told: Message | Refused | str) -> bytes:
    if isinstance(told, Refused):
        return f"event: error\ndata: {error_json(told.status, told.sentence)}\n\n".encode()
    return b": still here\n\n" if isinstance(told, str) else f"data: {json_of(told)}\n\n".encode()


async def _only(answers: AsyncGenerator[Message, None]) -> Message:
    async with aclosing(answers) as messages:
        return await anext(messages)


def _body(http: BaseHTTPRequestHandler) -> bytes:
    """Raises InvalidInputError, DeadlineError."""
    given = http.headers.get("content-length", "")
    if not (given.isascii() and given.isdecimal()):
        raise InvalidInputError("has to be there: a call says how long its body is", field="content-length")
    # So many digits are too many bytes whatever they are, and Python reads numbers up to some length alone.
    if len(given) > len(str(MOST_BODY_BYTES)) or int(given) > MOST_BODY_BYTES:
        raise InvalidInputError(f"says {given[:20]} bytes, {MOST_BODY_BYTES} are the most", field="content-length")
    try:
        return read_within(http.rfile.read1, int(given), BODY_TIMEOUT_S)
    except TimeoutError:
        raise DeadlineError(f"the body has not come within {BODY_TIMEOUT_S:g} s") from None


def _fail(http: BaseHTTPRequestHandler, status: str, sentence: str) -> None:
    _send(http, http_status(status), JSON, error_json(status, sentence).encode())


def _send(http: BaseHTTPRequestHandler, status: HTTPStatus, content_type: str, body: bytes) -> None:
    kept = "no-cache" if content_type != JSON else "no-store"
    _head(http, status, {"Content-Type": content_type, "Content-Length": str(len(body)), "Cache-Control": kept})
    http.wfile.write(body)


def _head(http: BaseHTTPRequestHandler, status: HTTPStatus, headers: Mapping[str, str]) -> None:
    http.send_response(status)
    for name, value in ({**headers, **SECURITY_HEADERS}).items():
        http.send_header(name, value)
    http.end_headers()
