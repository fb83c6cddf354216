"""What is read of logs: the service's own, what is asked for, the latest, and never more than may be told at once."""

import os
from pathlib import Path
from typing import Any

from cluster_core.event_log import MOST_CHARACTERS, LogEvent, beginning
from cluster_core.log_files import (
    MOST_EVENTS,
    MOST_READ_BYTES,
    MOST_TOLD_BYTES,
    LogQuery,
    latest,
    read_of_service,
    read_own,
)

QUERY = LogQuery()


def event(at_ms: int, message: str = "it happened", **fields: Any) -> LogEvent:
    told = {"level": "WARNING", "service": "svc-1", "process": "prefill-0", "logger": "a.part", **fields}
    return LogEvent(unix_ms=at_ms, message=message, **told)


def written(file: Path, *events: LogEvent, service: str = "svc-1", as_json: bool = True) -> Path:
    lines = [event(0, beginning(service), level="INFO"), *events]
    file.write_text("".join(f"{each.as_json() if as_json else each.as_text()}\n" for each in lines))
    return file


def messages(found: list[LogEvent]) -> list[str]:
    return [each.message for each in found if not each.message.startswith("the log of")]


def test_files_of_several_processes_are_one_story_in_order_of_time(tmp_path: Path) -> None:
    written(tmp_path / "worker-1.err", event(1, "one"), event(4, "four"))
    written(tmp_path / "worker-2.err", event(3, "three"), event(2, "two"), as_json=False)
    assert messages(read_of_service(tmp_path, "worker-*.err*", "svc-1", QUERY)) == ["one", "two", "three", "four"]


def test_files_of_another_service_and_of_nobody_are_not_read(tmp_path: Path) -> None:
    written(tmp_path / "worker-1.err", event(1, "ours"))
    written(tmp_path / "worker-2.err", event(2, "theirs"), service="svc-10")
    (tmp_path / "worker-3.err").write_text(event(3, "nobody's").as_json())
    (tmp_path / "raylet.err").write_text(event(4, "Ray's").as_json())
    assert messages(read_of_service(tmp_path, "worker-*.err*", "svc-1", QUERY)) == ["ours"]


def test_a_service_whose_name_begins_another_reads_its_own_alone(tmp_path: Path) -> None:
    written(tmp_path / "worker-1.err", event(1, "ours"), service="rag")
    written(tmp_path / "worker-2.err", event(2, "theirs"), service="rag-2")
    assert messages(read_of_service(tmp_path, "worker-*.err*", "rag", QUERY)) == ["ours"]


def test_a_query_takes_a_request_or_its_trace_a_level_and_what_is_not_older() -> None:
    events = [
        event(1, "early", level="ERROR", request_id="ask-1", trace_id="ab"),
        event(2, "quiet", level="INFO", request_id="ask-1", trace_id="ab"),
        event(3, "other", level="ERROR", request_id="ask-10"),
        event(4, "strange", level="FATAL"),
    ]
    assert messages(latest(events, LogQuery(request_id="ask-1"))) == ["early", "quiet"]
    assert messages(latest(events, LogQuery(request_id="ab"))) == ["early", "quiet"]
    assert messages(latest(events, LogQuery(level="WARNING"))) == ["early", "other", "strange"]
    assert messages(latest(events, LogQuery(since_ms=3))) == ["other", "strange"]
    assert messages(latest(events, LogQuery(most=1))) == ["strange"]


def test_events_of_one_millisecond_stay_in_their_order() -> None:
    assert messages(latest([event(1, "b"), event(1, "a"), event(1, "c")], QUERY)) == ["b", "a", "c"]


def test_an_exception_behind_an_event_of_text_belongs_to_it_and_lines_of_libraries_to_nobody(tmp_path: Path) -> None:
    failed = event(1, "failed", exception="Traceback\nValueError: no")
    file = tmp_path / "router.log"
    file.write_text(f"  nobody's\n:job_id:01\n{failed.as_text()}\nINFO 11-25 10:00:00 [core.py] loads\n")
    (found,) = read_own([file], QUERY)
    assert found.exception == "Traceback\nValueError: no"


def test_what_is_told_at_once_is_bounded_in_number_and_bytes() -> None:
    many = (event(at, "x") for at in range(3 * MOST_EVENTS))
    assert [each.unix_ms for each in latest(many, LogQuery(most=10**9))] == list(
        range(2 * MOST_EVENTS, 3 * MOST_EVENTS)
    )
    large = [event(at, "x" * 8000, exception="y" * 8000) for at in range(MOST_EVENTS)]
    found = latest(large, LogQuery(most=MOST_EVENTS))
    assert found[-1].unix_ms == MOST_EVENTS - 1
    assert MOST_TOLD_BYTES / 2 < sum(len(each.as_json()) for each in found) <= MOST_TOLD_BYTES


def test_of_a_large_file_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "router.log"
    lines = 2 * MOST_READ_BYTES // len(event(10**6).as_json())
    file.write_text("".join(f"{event(10**6 + at).as_json()}\n" for at in range(lines)))
    found = read_own([file], LogQuery(most=MOST_EVENTS))
    assert found[-1].unix_ms == 10**6 + lines - 1
    assert len(found) == MOST_EVENTS


def test_a_file_without_a_line_break_and_an_exception_without_an_end_cost_no_more_than_one_event(
    tmp_path: Path,
) -> None:
    file, endless = tmp_path / "router.log", tmp_path / "other.log"
    file.write_bytes(b"\xff" * 3 * MOST_READ_BYTES)
    endless.write_text(f"{event(1).as_text()}\n" + "  xxxxxxx\n" * 100_000)
    (found,) = read_own([file, endless], QUERY)
    assert 0 < len(found.exception) <= 2 * MOST_CHARACTERS


def test_what_is_gone_and_what_is_no_file_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-1.err")
    assert read_of_service(tmp_path, "*", "svc-1", QUERY) == []
    assert read_of_service(tmp_path / "none", "*", "svc-1", QUERY) == []
    assert read_own([tmp_path / "none"], QUERY) == []


def test_a_link_that_somebody_planted_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    written(elsewhere / "file", event(1, "another's"))
    (tmp_path / "worker-1.err").symlink_to(elsewhere / "file")
    assert read_of_service(tmp_path, "worker-*.err*", "svc-1", QUERY) == []


def test_a_file_that_was_written_last_before_what_is_asked_for_is_not_opened(tmp_path: Path) -> None:
    file = tmp_path / "router.log"
    written(file, event(2_000_000, "late"))
    os.utime(file, (1, 1))
    assert read_own([file], LogQuery(since_ms=1_500_000)) == []
    assert messages(read_own([file], LogQuery(since_ms=1_000))) == ["late"]
