"""What `rachis generate` takes before it asks anybody."""

from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation

from tests.command import rachis


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would have sent."""
    asked: dict[str, Any] = {}

    async def send(address: str, prompt: generation.PromptInput, sampling: dict[str, Any], **options: Any) -> None:
        asked.update(sampling)

    monkeypatch.setattr("command_line.generate.generate", send)
    return asked


def test_a_priority_goes_with_the_request_and_is_0_by_default(asked: dict[str, Any]) -> None:
    command = ["generate", "hello", "--address", "127.0.0.1:1"]

    assert rachis(*command).exit_code == 0
    assert asked["priority"] == 0
    assert rachis(*command, "--priority", "-1000").exit_code == 0
    assert asked["priority"] == -1000


@pytest.mark.parametrize(("priority", "limit"), [("-1001", "-1000"), ("1001", "1000")])
def test_a_priority_beyond_a_limit_is_refused_with_it(asked: dict[str, Any], priority: str, limit: str) -> None:
    refused = rachis("generate", "hello", "--priority", priority)

    assert refused.exit_code == 2
    # Out of its frame, which breaks lines.
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert "Invalid value for '--priority'" in told
    assert f"equal to {limit} " in told
    assert asked == {}


def test_several_choices_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def send(address: str, prompt: generation.PromptInput, choices: int, *given: Any, **options: Any) -> None:
        asked.append(choices)

    monkeypatch.setattr("command_line.generate.generate_choices", send)

    assert rachis("generate", "hello", "--address", "127.0.0.1:1", "-n", "3").exit_code == 0
    assert rachis("generate", "hello", "--address", "127.0.0.1:1", "-n", "17").exit_code == 2
    assert asked == [3]
