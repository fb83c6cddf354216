"""What `rachis logs --follow` takes for new."""

import pytest
from rachis.v1 import worker_pb2 as wire
from typer.testing import CliRunner

from cluster_core.errors import ConfigError
from command_line.logs import Unseen, event_of, nothing_found
from command_line.main import app


def event(at_ms: int, message: str = "a") -> wire.LogEvent:
    return wire.LogEvent(unix_ms=at_ms, message=message, process="router")


def test_an_event_that_is_told_again_is_shown_once() -> None:
    unseen = Unseen()
    assert unseen.of([event(1), event(2)]) == [event(1), event(2)]
    assert unseen.of([event(1), event(2), event(2, "b")]) == [event(2, "b")]


def test_an_event_that_comes_late_is_shown_all_the_same_and_what_is_remembered_is_bounded() -> None:
    unseen = Unseen()
    unseen.of([event(100_000)])
    assert unseen.of([event(75_000, "late")]) == [event(75_000, "late")]
    assert unseen.of([event(60_000, "too late")]) == []
    for at in range(100_000, 10_000_000, 1000):
        unseen.of([event(at)])
    assert len(unseen._seen) < 100  # what is remembered shows nowhere else
    assert unseen.since_ms == 9_999_000 - 30_000


def test_for_machines_times_are_numbers() -> None:
    assert event_of(event(7)) == {"unix_ms": 7, "message": "a", "process": "router"}


def test_nothing_found_says_what_was_looked_for() -> None:
    assert nothing_found(wire.LogQuery()).startswith("nothing is in the logs; ")
    assert nothing_found(wire.LogQuery(level="ERROR")).startswith("nothing at ERROR or above is in the logs; ")


def test_a_level_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL") as refused:
        CliRunner().invoke(app, ["logs", "--level", "loud"], catch_exceptions=False)
    assert refused.value.field == "--level"
