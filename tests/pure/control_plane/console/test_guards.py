"""Whose page makes a call, by its headers: the console's own, or somebody else's."""

import pytest

from control_plane.console.guards import refusal, refusal_of_host

OWN = {"host": "127.0.0.1:9400", "content-type": "application/json"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1:9400"},
        {"origin": "http://127.0.0.1:9400", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"content-type": "Application/JSON; charset=utf-8"},
        {"host": "localhost:9400"},
        {"host": "[::1]:9400"},
    ],
)
def test_the_consoles_own_page_and_commands_may_call(headers: dict[str, str]) -> None:
    assert refusal({**OWN, **headers}, is_open=True) == ""


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"origin": "http://evil.example"}, "another origin"),
        ({"origin": "null"}, "another origin"),
        ({"origin": "http://127.0.0.1:9401"}, "another origin"),
        ({"sec-fetch-site": "cross-site"}, "another site"),
        ({"sec-fetch-site": "same-site"}, "another site"),
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type"),
        ({"content-type": ""}, "content-type"),
        ({"host": "evil.example:9400"}, "by an address"),
        ({"host": "evil.example:9400", "origin": "http://evil.example:9400"}, "by an address"),
        ({"host": "127.0.0.1.evil.example"}, "by an address"),
        ({"host": ""}, "by an address"),
    ],
)
def test_a_page_of_somebody_else_may_not(headers: dict[str, str], word: str) -> None:
    assert word in refusal({**OWN, **headers}, is_open=True)


def test_with_keys_a_router_is_reached_by_a_name_too() -> None:
    assert refusal({**OWN, "host": "router.example"}, is_open=False) == ""


@pytest.mark.parametrize("here", [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("10.0.0.5", "10.0.0.5")])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("is_encrypted", [True, False])
@pytest.mark.parametrize("is_local", [True, False])
def test_this_host_may_call(here: tuple[str, str], is_open: bool, is_encrypted: bool, is_local: bool) -> None:
    assert refusal_of_host(*here, is_open=is_open, is_encrypted=is_encrypted, is_local=is_local) == ""


@pytest.mark.parametrize(
    ("is_open", "is_encrypted", "is_local", "word"),
    [
        (False, False, True, "keys are taken here from the router's own host alone"),
        (False, False, False, "keys are taken here from the router's own host alone"),
        (False, True, True, "router.admin_host"),
        (False, True, False, ""),
        (True, False, True, "router.admin_host"),
        (True, True, True, "router.admin_host"),
        (True, False, False, ""),
        (True, True, False, ""),
    ],
)
def test_another_host_may_call_where_no_key_would_be_overheard_and_administration_is_for_it_too(
    is_open: bool, is_encrypted: bool, is_local: bool, word: str
) -> None:
    told = refusal_of_host("10.0.0.6", "10.0.0.5", is_open=is_open, is_encrypted=is_encrypted, is_local=is_local)
    assert word in told and bool(told) == bool(word)
