"""What one peer of the HTTP server may cost: the head of its requests, and how long it takes nothing of its answers.

uvicorn bounds neither. Who asks is not known yet when a head comes: one that is too large ends its connection. So does
a peer that takes nothing, as if it had gone by itself: what answers it is cancelled, and what it has not taken is
forgotten.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 1 << 16
# A client that takes nothing for so long is gone.
SEND_TIMEOUT_S = 60.0
# Beside the name and the value of a header, which cost more when they are short.
_HEADER_BYTES = 4
_TOO_LARGE = f"The request's URL and headers are more than {MOST_HEAD_BYTES} bytes, which is the limit."


class _TooLargeError(Exception):
    """Of a head. httptools ends the parse, and uvicorn answers what it has parsed with `send_400_response`."""


class BoundedPeerProtocol(HttpToolsProtocol):
    """What uvicorn takes by itself (`--http auto`), with bounds."""

    send_timeout_s = SEND_TIMEOUT_S
    # Of the request whose head was begun last, its trailers included.
    _head_bytes = 0
    # That came since the parser has told anything: it keeps what is no whole header yet.
    _untold_bytes = 0
    _giving_up: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            # Nobody hears what comes after a refusal.
            return
        self._untold_bytes += len(data)
        super().data_received(data)
        if self._untold_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(_TOO_LARGE if self._head_bytes > MOST_HEAD_BYTES else msg)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _HEADER_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._untold_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._wait_no_more()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _count(self, head_bytes: int) -> None:
        self._untold_bytes = 0
        self._head_bytes += head_bytes
        if self._head_bytes > MOST_HEAD_BYTES:
            raise _TooLargeError

    def _watch(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._giving_up = self.loop.call_later(self.send_timeout_s, self._look, left)

    def _look(self, left: int) -> None:
        """left: in bytes, when it was looked at last. A slow peer may take long over what was written at once."""
        if self.transport.get_write_buffer_size() < left:
            self._watch()
        else:
            self.transport.abort()

    def _wait_no_more(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
