"""What `rachis gateway` is told: its section of the configuration, and where Redis is."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from control_plane.gateway import gateway
from tests.command import command_tree, handed_over, rachis

COMMAND = ("gateway", "--address", "127.0.0.1:1", "--port", "8123")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been run."""
    return handed_over(monkeypatch, gateway, "run")


def test_keys_of_its_section_are_its_own_and_other_options_are_vllms(told: list[Any]) -> None:
    answered = rachis(*COMMAND, "--set", "gateway.websocket.idle_timeout_s=7", "--api-key", "k")
    assert answered.exit_code == 0, answered.stderr
    ((_, section, _, given, named),) = told
    assert (section.host, section.port, section.websocket.idle_timeout_s) == ("127.0.0.1", 8123, 7)
    assert (given, named["redis_url"]) == (["--api-key", "k"], "")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("router.port=7000", "its own keys only"),
        ("gateway.websocket.idle_s=7", "idle_timeout_s"),
        ("gateway.websocket.max_responses=0", "greater than or equal to 1"),
    ],
)
def test_other_keys_and_bounds_are_refused(told: list[Any], assignment: str, sentence: str) -> None:
    refused = rachis(*COMMAND, "--set", assignment)
    assert refused.exit_code != 0
    assert sentence in " ".join(f"{refused.stderr} {refused.exception}".split())
    assert not told


def test_the_secret_is_told_and_without_it_nothing_but_loopback_is_listened_on(told: list[Any]) -> None:
    assert rachis(*COMMAND, "--set", "security.secret_file=/s").exit_code == 0
    ((_, _, security, _, _),) = told
    assert security.secret_file == "/s"
    refused = rachis(*COMMAND, "--host", "0.0.0.0")
    assert "gateway.host: is 0.0.0.0, and without API keys" in str(refused.exception) and len(told) == 1
    for more in ("security.secret_file=/s", "security.open=true"):
        assert rachis(*COMMAND, "--host", "0.0.0.0", "--set", more).exit_code == 0


def test_a_url_comes_as_an_option_or_on_standard_input(told: list[Any]) -> None:
    rachis(*COMMAND, "--redis", "redis://a:1/0")
    CliRunner().invoke(command_tree(), [*COMMAND, "--redis", "-"], input="redis://:secret@b:1/0\nmore\n")
    assert [named["redis_url"] for *_, named in told] == ["redis://a:1/0", "redis://:secret@b:1/0"]


def test_a_gateway_of_serve_writes_its_events_to_a_file_of_its_own_and_not_to_standard_error(
    told: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "gateway-0.log"
    assert rachis(*COMMAND, "--log-file", str(file), "--service", "svc-1").stderr == ""
    assert "the log of a process of service svc-1 begins" in file.read_text()
    assert "the log of a process begins" in rachis(*COMMAND).stderr
