"""Keys as they are kept: what fits, what has ended, and what a file may hold."""

import json

import pytest

from cluster_core.errors import ConfigError
from control_plane.access import api_keys
from control_plane.access.api_keys import ApiKey, new_key, parsed, rotated
from control_plane.access.roles import Identity, Role


def _new(**options: object) -> tuple[ApiKey, str]:
    wishes = {"lowest_priority": -3, "now_s": 100.0, "expires_s": None, **options}
    return new_key("chat", "acme", [Role.GENERATE], **wishes)  # type: ignore[arg-type]


def _fits(key: ApiKey, given: str, now_s: float) -> bool:
    parts = parsed(given)
    assert parts is not None and parts[0] == key.key_id
    return any(each.fits(parts[1]) for each in key.live_secrets(now_s))


def test_a_key_fits_what_its_holder_was_given_and_nothing_else() -> None:
    (key, given), (_, other) = _new(), _new()
    assert _fits(key, given, 100.0)
    secret = parsed(other)
    assert secret is not None and not key.secrets[0].fits(secret[1])
    assert given not in api_keys.written({key.key_id: key})
    assert secret[1] not in repr(key)


@pytest.mark.parametrize(("now_s", "is_good"), [(199.9, True), (200.0, False), (1e12, False)])
def test_a_key_ends_when_it_expires(now_s: float, is_good: bool) -> None:
    key, given = _new(expires_s=200.0)
    assert _fits(key, given, now_s) == is_good


def test_after_a_rotation_both_secrets_are_good_for_a_while() -> None:
    key, first = _new()
    key, second = rotated(key, now_s=100.0, grace_s=50.0)
    assert _fits(key, first, 149.0) and _fits(key, second, 149.0)
    assert not _fits(key, first, 150.0) and _fits(key, second, 150.0)


def test_a_second_rotation_ends_no_secret_later_than_it_was_to_end() -> None:
    key, first = _new()
    key, second = rotated(key, now_s=100.0, grace_s=50.0)
    key, third = rotated(key, now_s=140.0, grace_s=50.0)
    assert [_fits(key, each, 160.0) for each in (first, second, third)] == [False, True, True]


def test_a_rotation_without_grace_ends_what_was_at_once() -> None:
    key, first = _new()
    key, _ = rotated(key, now_s=100.0, grace_s=0.0)
    assert not _fits(key, first, 100.0) and len(key.secrets) == 1


def test_many_rotations_leave_three_secrets() -> None:
    key, _ = _new()
    for _ in range(10):
        key, given = rotated(key, now_s=100.0, grace_s=50.0)
    assert len(key.secrets) == 3 and _fits(key, given, 100.0)


def test_what_is_written_is_read() -> None:
    key, _ = _new(expires_s=200.0)
    rotated_key, _ = rotated(key, now_s=100.0, grace_s=50.0)
    keys = {rotated_key.key_id: rotated_key}
    assert api_keys.read(api_keys.written(keys)) == keys


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda whole: whole.update(version=2), "has version 2, this is version 1"),
        (lambda whole: whole.pop("keys"), r"no file of keys \(KeyError\)"),
        (lambda whole: whole["keys"][0].update(roles=["root"]), r"no file of keys \(ValueError\)"),
        (lambda whole: whole["keys"][0].pop("tenant"), r"no file of keys \(KeyError\)"),
        (lambda whole: whole["keys"][0]["secrets"][0].update(salt="zz"), r"no file of keys \(ValueError\)"),
        (lambda whole: whole.update(keys=3), r"no file of keys \(TypeError\)"),
        (lambda whole: whole["keys"][0].update(id=[]), r"no file of keys \(TypeError\)"),
        (lambda whole: whole["keys"][0].update(tenant=None), r"no file of keys \(TypeError\)"),
        (lambda whole: whole["keys"][0].update(name=""), r"no file of keys \(ValueError\)"),
        (lambda whole: whole["keys"][0].update(lowest_priority=float("inf")), r"no file of keys \(OverflowError\)"),
    ],
)
def test_another_file_is_refused_and_nothing_of_it_quoted(change: object, sentence: str) -> None:
    key, _ = _new()
    whole = json.loads(api_keys.written({key.key_id: key}))
    change(whole)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=sentence) as raised:
        api_keys.read(json.dumps(whole))
    assert key.secrets[0].hash.hex() not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"version": 1}', "\x00", "[" * 200_000])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no file of keys"):
        api_keys.read(text)


@pytest.mark.parametrize(
    "given",
    ["", "rk-", "sk-abc", f"rk-{'a' * 16}-short", f"rk-{'a' * 16}-{'x' * 44}", f"rk-{'A' * 16}-{'x' * 43}"],
)
def test_what_looks_like_no_key_is_none(given: str) -> None:
    assert parsed(given) is None


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "anybody"}, "name"),
        ({"name": "service"}, "name"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"roles": []}, "role"),
        ({"lowest_priority": -1001}, "lowest_priority"),
    ],
)
def test_a_key_with_a_bad_field_is_refused_by_name(wish: dict[str, object], field: str) -> None:
    options = {"name": "chat", "tenant": "acme", "roles": [Role.GENERATE], "lowest_priority": 0, **wish}
    with pytest.raises(ConfigError) as raised:
        new_key(**options, now_s=0.0, expires_s=None)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_an_identity_is_what_the_key_says() -> None:
    key, _ = _new()
    identity = key.identity
    assert identity == Identity("chat", "acme", frozenset({Role.GENERATE}), -3)
