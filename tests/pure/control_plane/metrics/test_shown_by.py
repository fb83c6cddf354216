"""By what somebody who asks over HTTP shows who that is: as a gateway has it, from the same headers."""

from http.client import HTTPMessage
from types import SimpleNamespace

import pytest

from control_plane.metrics.probe_server import shown_by


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ((), None),
        ((("Authorization", "Bearer a"),), "Bearer a"),
        ((("x-api-key", "a"),), "Bearer a"),
        ((("authorization", "Bearer a"), ("X-API-Key", "a")), "Bearer a"),
        ((("authorization", "Bearer a"), ("authorization", "Bearer b")), ""),
        ((("authorization", "Bearer a"), ("x-api-key", "b")), ""),
        ((("x-api-key", ""),), "Bearer "),
    ],
)
def test_keys_that_differ_are_none_and_who_brings_any_is_judged_by_that(
    headers: tuple[tuple[str, str], ...], authorization: str | None
) -> None:
    message = HTTPMessage()
    for name, value in headers:
        message.add_header(name, value)
    # As much of a request as is looked at.
    http = SimpleNamespace(headers=message, connection=None)
    assert shown_by(http).authorization == authorization  # type: ignore[arg-type]
