"""What `rachis generate` takes before it asks anybody."""

from typing import Any

import pytest

from command_line import generate
from tests.command import handed_over, rachis


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would have sent."""
    return handed_over(monkeypatch, generate, "generate")


def test_a_priority_goes_with_the_request_and_is_0_by_default(asked: list[Any]) -> None:
    command = ["generate", "hello", "--address", "127.0.0.1:1"]

    assert rachis(*command).exit_code == 0
    assert rachis(*command, "--priority", "-1000").exit_code == 0
    assert [sampling["priority"] for _, _, sampling, _ in asked] == [0, -1000]


@pytest.mark.parametrize(("priority", "limit"), [("-1001", "-1000"), ("1001", "1000")])
def test_a_priority_beyond_a_limit_is_refused_with_it(asked: list[Any], priority: str, limit: str) -> None:
    refused = rachis("generate", "hello", "--priority", priority)

    assert refused.exit_code == 2
    # Out of its frame, which breaks lines.
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert "Invalid value for '--priority'" in told
    assert f"equal to {limit} " in told
    assert not asked


def test_several_choices_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = handed_over(monkeypatch, generate, "generate_choices")

    assert rachis("generate", "hello", "--address", "127.0.0.1:1", "-n", "3").exit_code == 0
    assert rachis("generate", "hello", "--address", "127.0.0.1:1", "-n", "17").exit_code == 2
    assert [choices for _, _, choices, _, _ in asked] == [3]
