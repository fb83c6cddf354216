"""What `rachis logs` says where it finds nothing, and refuses."""

import pytest
from rachis.v1 import worker_pb2 as wire
from typer.testing import CliRunner

from cluster_core.errors import ConfigError
from command_line.logs import event_of, nothing_found
from command_line.main import app


def test_for_machines_times_are_numbers() -> None:
    event = wire.LogEvent(unix_ms=7, message="a", process="router")
    assert event_of(event) == {"unix_ms": 7, "message": "a", "process": "router"}


def test_nothing_found_says_what_was_looked_for() -> None:
    assert nothing_found(wire.LogQuery()).startswith("nothing is in the logs; ")
    assert nothing_found(wire.LogQuery(level="ERROR")).startswith("nothing at ERROR or above is in the logs; ")


def test_a_level_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL") as refused:
        CliRunner().invoke(app, ["logs", "--level", "loud"], catch_exceptions=False)
    assert refused.value.field == "--level"
