"""What is read of logs: the service's own, what is asked for, the latest, and never more than may be told at once."""

import os
from pathlib import Path
from typing import Any

import pytest

from cluster_core.event_log import MOST_CHARACTERS, LogEvent, beginning
from cluster_core.log_files import (
    MOST_EVENTS,
    MOST_READ_BYTES,
    MOST_READ_IN_ALL_BYTES,
    MOST_TOLD_BYTES,
    LogQuery,
    Told,
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


def messages(found: Told[LogEvent]) -> list[str]:
    return [each.message for each in found.events if not each.message.startswith("the log of")]


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
    (found,) = read_own([file], "svc-1", QUERY).events
    assert found.exception == "Traceback\nValueError: no"


@pytest.mark.parametrize("as_json", [True, False])
def test_of_a_file_that_processes_of_two_services_have_written_their_own_is_read(as_json: bool, tmp_path: Path) -> None:
    file, other, nobodys = (tmp_path / name for name in ("router.log", "gateway-0.log", "gateway-1.log"))
    logger = "cluster_core.event_log"
    begun = [event(0, beginning(service), level="INFO", logger=logger, service=service) for service in ("b", "svc-1")]
    events = (begun[0], event(1, "theirs", service="b"), begun[1], event(2, "ours"))
    file.write_text("".join(f"{each.as_json() if as_json else each.as_text()}\n" for each in events))
    other.write_text("".join(f"{each.as_json() if as_json else each.as_text()}\n" for each in events[:2]))
    nobodys.write_text(event(3, "nobody's", service="").as_json())
    assert messages(read_own([file, other, nobodys], "svc-1", QUERY)) == ["ours", "nobody's"]
    assert "theirs" in messages(read_own([file, other, nobodys], "", QUERY))


def test_of_a_long_exception_in_text_the_end_is_told(tmp_path: Path) -> None:
    file = tmp_path / "router.log"
    file.write_text(event(1, exception="a frame\n" * MOST_CHARACTERS + "ValueError: no").as_text())
    (found,) = read_own([file], "svc-1", QUERY).events
    assert found.exception.endswith("a frame\nValueError: no") and len(found.exception) == MOST_CHARACTERS


def test_what_is_told_at_once_is_bounded_in_number_and_bytes() -> None:
    many = (event(at, "x") for at in range(3 * MOST_EVENTS))
    told = latest(many, LogQuery(most=10**9))
    assert [each.unix_ms for each in told.events] == list(range(2 * MOST_EVENTS, 3 * MOST_EVENTS))
    assert told.left_out == 2 * MOST_EVENTS
    large = [event(at, "x" * 8000, exception="y" * 8000) for at in range(MOST_EVENTS)]
    told = latest(large, LogQuery(most=MOST_EVENTS))
    assert told.events[-1].unix_ms == MOST_EVENTS - 1
    assert MOST_TOLD_BYTES / 2 < sum(len(each.as_json()) for each in told.events) <= MOST_TOLD_BYTES
    assert told.left_out == MOST_EVENTS - len(told.events)


def test_what_is_not_asked_for_is_not_left_out() -> None:
    events = [event(1, "early"), event(2, "quiet", level="INFO"), event(3, "late")]
    assert latest(events, LogQuery(level="WARNING", since_ms=2)).left_out == 0
    assert latest(events, LogQuery(most=1)).left_out == 2


def test_of_a_large_file_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "router.log"
    lines = 5 * MOST_READ_BYTES // 4 // len(event(10**6).as_json())
    file.write_text("".join(f"{event(10**6 + at).as_json()}\n" for at in range(lines)))
    found = read_own([file], "svc-1", LogQuery(most=MOST_EVENTS)).events
    assert found[-1].unix_ms == 10**6 + lines - 1
    assert len(found) == MOST_EVENTS


def test_of_many_large_files_those_written_last_are_read(tmp_path: Path) -> None:
    long = f"{'x' * (MOST_READ_BYTES - 1)}\n".encode()
    full = MOST_READ_IN_ALL_BYTES // MOST_READ_BYTES
    for number in range(full + 1):
        file = tmp_path / f"gateway-{number}.log"
        file.write_bytes(long + event(number).as_json().encode())
        os.utime(file, (number, number))
    found = read_own(tmp_path.iterdir(), "svc-1", LogQuery(most=MOST_EVENTS)).events
    assert [each.unix_ms for each in found] == list(range(1, full + 1))


def test_a_file_without_a_line_break_and_an_exception_without_an_end_cost_no_more_than_one_event(
    tmp_path: Path,
) -> None:
    file, endless = tmp_path / "router.log", tmp_path / "other.log"
    file.write_bytes(b"\xff" * 3 * MOST_READ_BYTES)
    endless.write_text(f"{event(1).as_text()}\n" + "  xxxxxxx\n" * 100_000)
    (found,) = read_own([file, endless], "svc-1", QUERY).events
    assert len(found.exception) == MOST_CHARACTERS


def test_what_is_gone_and_what_is_no_file_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-1.err")
    assert read_of_service(tmp_path, "*", "svc-1", QUERY) == Told([])
    assert read_of_service(tmp_path / "none", "*", "svc-1", QUERY) == Told([])
    assert read_own([tmp_path / "none"], "svc-1", QUERY) == Told([])


def test_a_link_that_somebody_planted_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    written(elsewhere / "file", event(1, "another's"))
    (tmp_path / "worker-1.err").symlink_to(elsewhere / "file")
    assert read_of_service(tmp_path, "worker-*.err*", "svc-1", QUERY) == Told([])


def test_what_became_a_link_after_its_folder_was_read_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = written(tmp_path / "elsewhere", event(1, "another's"))
    (tmp_path / "router.log").symlink_to(elsewhere)
    # The folder still told of a file.
    monkeypatch.setattr(Path, "lstat", Path.stat)
    assert read_own([tmp_path / "router.log"], "svc-1", QUERY) == Told([])


def test_what_became_a_pipe_after_its_folder_was_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "file", event(1))
    os.mkfifo(tmp_path / "router.log")
    told = file.stat()
    # The folder still told of a file.
    monkeypatch.setattr(Path, "lstat", lambda _: told)
    assert read_own([tmp_path / "router.log"], "svc-1", QUERY) == Told([])


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "worker-1.err", event(1, "another's"))
    # Whoever runs the tests may not give files away.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_of_service(tmp_path, "worker-*.err*", "svc-1", QUERY) == Told([])
    # Nor one that was put in the place of ours meanwhile.
    told = os.stat_result((0o100666, 0, 0, 1, os.geteuid(), 0, 0, 0, 0, 0))
    # The folder told of ours: what is there is another's.
    monkeypatch.setattr(Path, "lstat", lambda _: told)
    assert read_of_service(tmp_path, "worker-*.err*", "svc-1", QUERY) == Told([])


def test_a_file_that_was_written_last_before_what_is_asked_for_is_not_opened(tmp_path: Path) -> None:
    file = tmp_path / "router.log"
    written(file, event(2_000_000, "late"))
    os.utime(file, (1, 1))
    assert read_own([file], "svc-1", LogQuery(since_ms=1_500_000)) == Told([])
    assert messages(read_own([file], "svc-1", LogQuery(since_ms=1_000))) == ["late"]
