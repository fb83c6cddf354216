"""What `rachis gateway` is told: its section of the configuration, and where Redis is."""

from typing import Any

import pytest
from click.testing import CliRunner

from cluster_configs.schema import GatewaySection, SecuritySection
from tests.command import command_tree, rachis

COMMAND = ("gateway", "--address", "127.0.0.1:1", "--port", "8123")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have been run."""
    told: dict[str, Any] = {}

    async def run(
        address: str, section: GatewaySection, security: SecuritySection, given: list[str], **options: Any
    ) -> None:
        told.update(options, address=address, section=section, security=security, given=given)

    monkeypatch.setattr("control_plane.gateway.gateway.run", run)
    return told


def test_keys_of_its_section_are_its_own_and_other_options_are_vllms(told: dict[str, Any]) -> None:
    answered = rachis(*COMMAND, "--set", "gateway.websocket.idle_timeout_s=7", "--api-key", "k")
    assert answered.exit_code == 0, answered.stderr
    section = told["section"]
    assert (section.host, section.port, section.websocket.idle_timeout_s) == ("127.0.0.1", 8123, 7)
    assert (told["given"], told["redis_url"]) == (["--api-key", "k"], "")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("router.port=7000", "its own keys only"),
        ("gateway.websocket.idle_s=7", "idle_timeout_s"),
        ("gateway.websocket.max_responses=0", "greater than or equal to 1"),
    ],
)
def test_other_keys_and_bounds_are_refused(told: dict[str, Any], assignment: str, sentence: str) -> None:
    refused = rachis(*COMMAND, "--set", assignment)
    assert refused.exit_code != 0
    assert sentence in " ".join(f"{refused.stderr} {refused.exception}".split())
    assert not told


def test_the_secret_is_told_and_without_it_nothing_but_loopback_is_listened_on(told: dict[str, Any]) -> None:
    assert rachis(*COMMAND, "--set", "security.secret_file=/s").exit_code == 0
    assert told.pop("security").secret_file == "/s"
    refused = rachis(*COMMAND, "--host", "0.0.0.0")
    assert "gateway.host: is 0.0.0.0, and without API keys" in str(refused.exception) and "security" not in told
    for more in ("security.secret_file=/s", "security.open=true"):
        assert rachis(*COMMAND, "--host", "0.0.0.0", "--set", more).exit_code == 0


def test_a_url_comes_as_an_option_or_on_standard_input(told: dict[str, Any]) -> None:
    rachis(*COMMAND, "--redis", "redis://a:1/0")
    assert told["redis_url"] == "redis://a:1/0"
    CliRunner().invoke(command_tree(), [*COMMAND, "--redis", "-"], input="redis://:secret@b:1/0\nmore\n")
    assert told["redis_url"] == "redis://:secret@b:1/0"
