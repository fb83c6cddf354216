"""The body of a request is refused while it comes, where it is larger than it may be."""

from typing import Any

import pytest
from fastapi import HTTPException

from control_plane.gateway.bounded_body import BoundedBody

LIMIT = 10


async def read(*pieces: bytes, kind: str = "http", declared: str = "") -> list[bytes]:
    """What an application reads of this body."""
    taken: list[bytes] = []
    coming = iter(pieces)

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.request", "body": next(coming)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in pieces:
            message = await receive()
            taken.append(message["body"])

    headers = [(b"content-length", declared.encode())] if declared else []
    try:
        await BoundedBody(app, LIMIT)({"type": kind, "headers": headers}, receive, None)
    except HTTPException as refused:
        assert (refused.status_code, refused.detail) == (
            413, "The request's body has more than 10 bytes, which is the limit.",
        )  # fmt: skip
        taken.append(b"refused")
    return taken


@pytest.mark.parametrize("declared", ["", "10", "nonsense"])
async def test_what_is_not_too_large_is_read(declared: str) -> None:
    assert await read(b"x" * 4, b"x" * 6, declared=declared) == [b"x" * 4, b"x" * 6]


@pytest.mark.parametrize("declared", ["", "4"])
async def test_what_becomes_too_large_is_refused_when_it_does(declared: str) -> None:
    assert await read(b"x" * 4, b"x" * 7, b"x", declared=declared) == [b"x" * 4, b"refused"]


async def test_what_says_that_it_is_too_large_is_not_read() -> None:
    assert await read(b"x", declared="11") == [b"refused"]


async def test_a_websocket_has_bounds_of_its_own() -> None:
    assert await read(b"x" * 20, kind="websocket") == [b"x" * 20]
