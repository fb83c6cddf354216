"""A stream that fails before its first chunk is answered with the failure's status and headers.

vLLM answers 200 and an event with the error. The first chunk comes with the first token, so nothing waits for this.
`/v1/responses` sends two events before, which say nothing yet: they wait for the next.
"""

from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse

from control_plane.gateway.router_core import FAILURES

# Of `/v1/responses`, before anything is generated.
SAYS_NOTHING = frozenset({"response.created", "response.in_progress"})
_SAY_NOTHING = tuple(f"event: {kind}\n".encode() for kind in sorted(SAYS_NOTHING))
_LEAST_FAILURE = 400
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
    """`send` of one request: the start of a stream waits for its first chunk that says something.

    The start of an answer that says that it failed waits, too: vLLM's `/v1/messages` leaves the headers out.
    """

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
        self._held: list[Any] = []
        self._is_refused = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and (_is_stream(message) or self._has_failed(message)):
            self._held.append(message)
            return
        if self._held:
            if message.get("body", b"").startswith(_SAY_NOTHING):
                self._held.append(message)
                return
            held, self._held = self._held, []
            if self._failures:
                self._is_refused = True
                refusal = self._answer(self._failures[0], self._scope["path"])
                await refusal(self._scope, self._receive, self._send)
            else:
                for each in held:
                    await self._send(each)
        if not self._is_refused:
            await self._send(message)

    def _has_failed(self, message: Any) -> bool:
        return bool(self._failures) and message["status"] >= _LEAST_FAILURE


def _is_stream(message: Any) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(_STREAM) for name, value in message["headers"])
