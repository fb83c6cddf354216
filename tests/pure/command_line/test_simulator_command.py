"""What `rachis bench simulator` refuses before it starts a service."""

import pytest

from cluster_core.errors import ConfigError
from tests.command import rachis


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--workload", "agents,chat"), "conversation, long_prompts, long_answers, retrieval, agents, got 'chat'"),
        (("--load", "lower"), "low, middle, high, got 'lower'"),
        (("--set", "engine.device=cpu", "--set", "engine.cost_model=null"), "engine.device"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    refused = rachis("bench", "simulator", *arguments).exception
    assert isinstance(refused, ConfigError)
    assert named in str(refused)
