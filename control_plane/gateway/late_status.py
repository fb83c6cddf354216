"""A stream that fails before its first chunk is answered with the failure's status and headers.

vLLM answers 200 and an event with the error. The first chunk comes with the first token, so nothing waits for this;
`/v1/responses` sends an event before, and keeps vLLM's way.
"""

from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse

from control_plane.gateway.router_core import FAILURES

_STREAM = b"text/event-stream"


class LateStatus:
    """ASGI middleware. answer: makes one of an exception and the path that was asked."""

    def __init__(self, app: Any, answer: Callable[[Exception, str], JSONResponse]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failures: list[Exception] = []
        FAILURES.set(failures)
        await self._app(scope, receive, _Guarded(scope, receive, send, failures, self._answer))


class _Guarded:
    """`send` of one request: the start of a stream waits for its first chunk."""

    def __init__(
        self,
        scope: Any,
        receive: Any,
        send: Any,
        failures: list[Exception],
        answer: Callable[[Exception, str], JSONResponse],
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._failures = failures
        self._answer = answer
        self._start: Any = None
        self._is_refused = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and _is_stream(message):
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            if self._failures:
                self._is_refused = True
                refusal = self._answer(self._failures[0], self._scope["path"])
                await refusal(self._scope, self._receive, self._send)
            else:
                await self._send(start)
        if not self._is_refused:
            await self._send(message)


def _is_stream(message: Any) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(_STREAM) for name, value in message["headers"])
