"""How large the body of an HTTP request may be: it is refused while it comes, before all of it is in memory."""

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException


class BoundedBody:
    """ASGI middleware. What it raises is raised where the body is read, and vLLM's handler answers it with 413."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared, came = _declared(scope["headers"]), 0

        async def bounded() -> Any:
            nonlocal came
            self._check(declared)
            message = await receive()
            came += len(message.get("body", b""))
            self._check(came)
            return message

        await self._app(scope, bounded, send)

    def _check(self, size: int) -> None:
        """size: in bytes. Raises HTTPException."""
        if size > self._max_bytes:
            sentence = f"The request's body has more than {self._max_bytes} bytes, which is the limit."
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)


def _declared(headers: list[tuple[bytes, bytes]]) -> int:
    """In bytes; 0 where nothing is said, or what is no number: the HTTP server has judged it."""
    said = dict(headers).get(b"content-length", b"")
    return int(said) if said.isdigit() else 0
