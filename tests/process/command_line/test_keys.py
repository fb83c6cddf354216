"""`rachis keys`: what is shown once, what is listed, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from cluster_wire.secret import read_secret
from control_plane.access.api_keys import parsed
from control_plane.access.key_file import read_keys
from tests.command import rachis


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def create(file: Path, name: str, *more: object) -> Result:
    return rachis("keys", "create", name, "--tenant", "acme", "--role", "generate", "--file", file, *more)


def told(result: Result) -> Any:
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    return json.loads(result.stdout.splitlines()[-1])


def test_a_key_is_shown_once_and_opens_what_is_in_the_file(file: Path) -> None:
    made = create(file, "chat")
    assert made.exit_code == 0, made.exception
    given = made.stdout.strip()
    parts = parsed(given)
    assert parts is not None
    (key,) = read_keys(file).values()
    assert key.secrets[0].fits(parts[1]) and (key.name, key.tenant) == ("chat", "acme")
    listed = rachis("keys", "list", "--file", file)
    assert "chat" in listed.stdout and parts[1] not in listed.stdout + file.read_text()


def test_for_machines(file: Path) -> None:
    made = told(create(file, "chat", "--role", "observe", "--lowest-priority", -5, "--expires-days", 2, "--json"))
    assert made["name"] == "chat" and parsed(made["key"])
    (listed,) = told(rachis("keys", "list", "--file", file, "--json"))["keys"]
    assert (listed["roles"], listed["lowest_priority"], listed["expired"]) == (["generate", "observe"], -5, False)
    assert listed["expires"] > listed["created"]


def test_a_rotated_key_has_two_secrets_and_a_revoked_one_is_gone(file: Path) -> None:
    first = told(create(file, "chat", "--json"))["key"]
    second = told(rachis("keys", "rotate", "chat", "--file", file, "--json"))["key"]
    assert parsed(first) != parsed(second)
    assert told(rachis("keys", "list", "--file", file, "--json"))["keys"][0]["live_secrets"] == 2
    told(rachis("keys", "rotate", "chat", "--grace-s", 0, "--file", file, "--json"))
    assert told(rachis("keys", "list", "--file", file, "--json"))["keys"][0]["live_secrets"] == 1
    assert told(rachis("keys", "revoke", "chat", "--file", file, "--json")) == {"revoked": "chat"}
    assert told(rachis("keys", "list", "--file", file, "--json"))["keys"] == []


def test_an_expired_key_is_listed_as_such(file: Path) -> None:
    create(file, "chat", "--expires-days", 0)
    assert "expired" in rachis("keys", "list", "--file", file).stdout


def test_the_file_is_that_of_the_configuration(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACHIS_SECURITY__KEYS_FILE", str(file))
    monkeypatch.setenv("RACHIS_SECURITY__SECRET_FILE", str(file.with_name("secret")))
    assert rachis("keys", "create", "chat", "--tenant", "acme", "--role", "generate").exit_code == 0
    assert len(read_keys(file)) == 1


GOOD = ("--tenant", "acme", "--role", "generate")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("create", "a b", *GOOD), "name: must be 1 to 64 letters"),
        (("create", "a", "--tenant", "/", "--role", "generate"), "tenant: must be 1 to 64 letters"),
        (("create", "a", *GOOD, "--role", "root"), "--role: must be one of generate, observe, operate, got `root`"),
        (("create", "a", *GOOD, "--lowest-priority", -2000), "lowest_priority: must be in [-1000, 1000]"),
        (("create", "service", *GOOD), "name: `service` is what the service itself calls somebody"),
        (("create", "chat", *GOOD), "name: there is a key `chat`"),
        (("rotate", "none"), "name: no key `none`; there are: chat"),
        (("revoke", "none"), "name: no key `none`; there are: chat"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    file: Path, arguments: tuple[object, ...], sentence: str
) -> None:
    create(file, "chat")
    before = file.read_bytes()
    refused = rachis("keys", *arguments, "--file", file)
    assert refused.exit_code != 0 and sentence in str(refused.exception)
    assert file.read_bytes() == before


def test_without_a_file_it_says_what_to_give(file: Path) -> None:
    refused = rachis("keys", "list")
    assert "--file: give it, or set security.keys_file" in str(refused.exception)
    refused = rachis("keys", "list", "--file", file)
    assert "cannot be read: No such file" in str(refused.exception)


def test_a_secret_is_made_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert told(rachis("keys", "secret", path, "--json")) == {"secret_file": str(path)}
    before = read_secret(path).service_key
    refused = rachis("keys", "secret", path)
    assert "is there already" in str(refused.exception)
    assert read_secret(path).service_key == before


def test_a_certificate_is_known_in_place_of_a_key(file: Path) -> None:
    made = told(create(file, "chat", "--certificate", "uri:spiffe://acme/chat", "--json"))
    assert made == {"name": "chat", "certificate": "uri:spiffe://acme/chat"}
    create(file, "other", "--certificate", "cn:other")
    (key, _) = read_keys(file).values()
    assert (key.secrets, key.certificate) == ((), "uri:spiffe://acme/chat")
    listed = rachis("keys", "list", "--file", file).stdout
    assert "uri:spiffe://acme/chat" in listed and "cn:other" in listed
    assert told(rachis("keys", "list", "--file", file, "--json"))["keys"][0]["certificate"] == "uri:spiffe://acme/chat"


@pytest.mark.parametrize(
    ("name", "certificate", "sentence"),
    [
        ("other", "cn:chat", "--certificate: `chat` has that certificate"),
        ("chat", "cn:other", "there is a key `chat`"),
        ("other", "chat", "certificate: must be a name in certificates"),
        ("other", "dns:Chat.example", "certificate: must be a name in certificates"),
    ],
)
def test_a_certificate_that_cannot_be_is_refused(file: Path, name: str, certificate: str, sentence: str) -> None:
    create(file, "chat", "--certificate", "cn:chat")
    refused = create(file, name, "--certificate", certificate)
    assert refused.exit_code != 0 and sentence in str(refused.exception)
    assert len(read_keys(file)) == 1


def test_what_is_known_by_a_certificate_has_nothing_to_rotate(file: Path) -> None:
    create(file, "chat", "--certificate", "cn:chat")
    refused = rachis("keys", "rotate", "chat", "--file", file)
    assert "known by a certificate, which its authority renews" in str(refused.exception)
    assert told(rachis("keys", "revoke", "chat", "--file", file, "--json")) == {"revoked": "chat"}
