"""What a process logs: a line for each event, in two forms that read back as the same event."""

import errno
import json
import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core import event_log
from cluster_core.event_log import (
    MOST_CHARACTERS,
    EventHandler,
    LogEvent,
    LogFile,
    LogRules,
    about,
    attempt,
    event_of,
    logged,
    lost_lines,
    parsed,
)

AT_MS = 1_795_000_000_123
EVENT = LogEvent(AT_MS, "WARNING", "svc-1", "prefill-0", "worker_runtime.host", "it leaves", "ask-2", "ab12")


class Full:
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Lines:
    """A stream that keeps what it gets."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def record(message: Any, *args: Any, **more: Any) -> logging.LogRecord:
    fields = {"name": "a.part", "levelname": "ERROR", "msg": message, "args": args, "created": AT_MS / 1000}
    return logging.makeLogRecord({**fields, **more})


def handled(stream: Any, *records: logging.LogRecord, as_json: bool = True) -> EventHandler:
    handler = EventHandler("svc-1", "router", as_json=as_json, stream=stream)
    for each in records:
        handler.handle(each)
    return handler


@pytest.fixture(autouse=True)
def about_nothing() -> Iterator[None]:
    yield
    about("")


def test_an_event_is_one_line_of_json_with_what_there_is_of_it() -> None:
    told = json.loads(EVENT.as_json())
    assert told == {
        "time": "2026-11-18T11:06:40.123Z",
        "level": "WARNING",
        "service": "svc-1",
        "process": "prefill-0",
        "logger": "worker_runtime.host",
        "message": "it leaves",
        "request_id": "ask-2",
        "trace_id": "ab12",
    }
    assert "request_id" not in json.loads(LogEvent(AT_MS, "INFO", "svc-1", "router", "a", "b").as_json())


def test_an_event_is_one_line_of_text_for_people() -> None:
    assert EVENT.as_text() == (
        "2026-11-18T11:06:40.123Z WARNING prefill-0 worker_runtime.host: it leaves [request ask-2, trace ab12]"
    )


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="[]"), min_size=1)


@given(WORDS, WORDS, st.sampled_from(event_log.LEVELS), st.sampled_from(["", "ask-2"]), st.sampled_from(["", "ab12"]))
def test_what_was_written_in_either_form_is_read_back(
    message: str, process: str, level: str, request_id: str, trace_id: str
) -> None:
    trace_id = trace_id if request_id else ""
    event = LogEvent(AT_MS, level, "svc-1", process, "a.part", message, request_id, trace_id)
    assert parsed(event.as_json()) == event
    as_text = parsed(event.as_text())
    assert as_text is not None
    assert (as_text.message, as_text.process, as_text.level, as_text.unix_ms) == (message, process, level, AT_MS)
    assert (as_text.request_id, as_text.trace_id) == (request_id, trace_id)


@given(st.text())
def test_whatever_stands_in_a_line_reading_it_does_not_raise(line: str) -> None:
    parsed(line)
    parsed("{" + line)


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"time": 3}', '{"time": "2026"}', ":job_id:01", "INFO 11-25 a: b"])
def test_a_line_of_a_library_is_no_event(line: str) -> None:
    assert parsed(line) is None


def test_a_message_with_line_breaks_is_one_line_and_cannot_pretend_to_be_two() -> None:
    forged = "a\n" + EVENT.as_text() + "\r\n" + EVENT.as_json()
    for as_json in (False, True):
        stream = Lines()
        handled(stream, record("%s", forged), as_json=as_json)
        assert len(stream.text.splitlines()) == 1
        (event,) = [parsed(line) for line in stream.text.splitlines()]
        assert event is not None
        assert event.logger == "a.part"


def test_what_a_request_is_logged_under_comes_from_its_task_or_from_the_line() -> None:
    assert event_of(record("a"), "svc-1", "router").request_id == ""
    about("ask-1", "ab12")
    assert event_of(record("a"), "svc-1", "router").trace_id == "ab12"
    assert event_of(record("a", request_id="ask-9"), "svc-1", "router").request_id == "ask-9"


def test_what_an_engine_logs_of_an_attempt_is_about_the_request_while_its_call_runs() -> None:
    def named(**extra: str) -> tuple[str, str]:
        event = event_of(record("a", **extra), "svc-1", "decode-0")
        return event.request_id, event.trace_id

    with attempt("r7.1", "ask-1", "ab12"), attempt("r7.2", "ask-2", "cd34"):
        assert named(request_id="r7.1") == ("ask-1", "ab12")
        assert named(request_id="r7.1-0a1b2c3d") == ("ask-1", "ab12"), "as vLLM calls it"
        assert named(request_id="r7.10") == ("r7.10", "cd34") and named(request_id="") == ("", "cd34")
        with attempt("r7.1", "ask-3", ""):
            assert named() == ("ask-3", ""), "whoever takes a name that is taken logs under its own"
        assert named(request_id="r7.1") == ("ask-1", "ab12"), "and leaves the first its name"
    assert named(request_id="r7.1")[0] == "r7.1", "nothing is kept of a call that has ended"


def test_an_exception_goes_with_its_event_and_long_texts_are_cut() -> None:
    try:
        raise ValueError("x" * 3 * MOST_CHARACTERS)
    except ValueError:
        event = event_of(record("y" * 3 * MOST_CHARACTERS, exc_info=sys.exc_info()), "svc-1", "router")
    assert len(event.exception) == len(event.message) == MOST_CHARACTERS


def test_of_a_long_traceback_the_end_is_kept_which_says_why() -> None:
    def fails(calls: int) -> None:
        if not calls:
            raise ValueError("it has no room")
        try:
            fails(calls - 1)
        except ValueError as error:
            raise ValueError("it has no room, at last") from error

    try:
        fails(30)
    except ValueError:
        event = event_of(record("it failed", exc_info=sys.exc_info()), "svc-1", "router")
    assert len(event.exception) == MOST_CHARACTERS
    assert event.exception.endswith("ValueError: it has no room, at last")


def test_arguments_that_do_not_fit_harm_nobody() -> None:
    assert event_of(record("%s and %d", "one"), "svc-1", "router").message == "%s and %d"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_line_that_a_full_disk_does_not_take_is_counted_and_raises_nothing(as_json: bool) -> None:
    handler = handled(Full(), record("one"), record("two"), as_json=as_json)
    assert handler.lost == 2


def test_a_stream_that_loses_lines_by_itself_is_believed() -> None:
    class Lossy(Lines):
        lost = 0

        def write(self, text: str) -> int:
            self.lost += 1
            return 0

    assert handled(Lossy(), record("one"), record("two")).lost == 2


def test_a_process_without_standard_error_counts_what_it_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is the interpreter's own, and None where a process was started without it.
    monkeypatch.setattr(sys, "stderr", None)
    assert handled(None, record("one")).lost == 1


def test_a_log_says_first_whose_it_is_and_then_what_is_at_its_level_or_above(tmp_path: Path) -> None:
    file = tmp_path / "state" / "router.log"
    with logged("svc-1", "router", LogRules("WARNING", "json"), file):
        logging.getLogger("control_plane.a_part").info("not this")
        logging.getLogger("control_plane.a_part").warning("but this")
        assert event_log.log_file() == (file, "svc-1")
        assert lost_lines() == 0
    logging.getLogger("control_plane.a_part").warning("after it")
    first, second = [parsed(line) for line in file.read_text().splitlines()]
    assert first is not None and second is not None
    assert first.message == event_log.beginning("svc-1")
    assert (second.message, second.service, second.process) == ("but this", "svc-1", "router")
    assert file.stat().st_mode & 0o077 == 0
    assert event_log.log_file() is None


def test_a_file_that_cannot_be_written_is_counted_beside_standard_error_that_can(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with logged("svc-1", "router", LogRules(), in_the_way / "router.log"):
        assert lost_lines() == 1


def test_a_file_that_is_full_is_begun_anew_and_the_one_before_stays(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "router.log", most_bytes=5)
    for text in ("first\n", "second\n", "third\n"):
        file.write(text)
    assert (tmp_path / "router.log").read_text() == "third\n"
    assert (tmp_path / "router.log.1").read_text() == "second\n"


def test_a_line_that_a_disk_took_half_of_is_lost_and_the_next_begins_behind_it(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "router.log")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        file.write("first\n")
        for _ in range(2):
            with pytest.raises(OSError, match=r"No space|too large"):
                file.write("second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write("third\n")
    file.write("fourth\n")
    assert (tmp_path / "router.log").read_text() == "first\nsec\nthird\nfourth\n"


def test_a_log_is_written_to_its_file_alone_where_standard_error_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logged("svc-1", "gateway", LogRules(), tmp_path / "gateway.log", only_there=True):
        logging.getLogger("control_plane.a_part").warning("one")
    assert "one" in (tmp_path / "gateway.log").read_text()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "2026-13-40T99:99:99.123Z WARNING router a: b",
        '{"time": "1960-01-01T00:00:00Z", "message": "before all"}',
        '{"time": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=["no date", "before 1970", "deep"],
)
def test_a_line_that_says_no_time_is_no_event_and_harms_no_other(line: str) -> None:
    assert parsed(line) is None


def test_half_a_character_is_replaced() -> None:
    event = parsed('{"time": "2026-11-18T11:06:40.123Z", "message": "a\\ud800b"}')
    assert event is not None and event.message == "a?b"


@pytest.mark.parametrize("request_id", ["my request 1", "a, trace x", "a] b", "50%", "ask-2"])
def test_an_id_of_a_client_is_read_from_text_as_it_was(request_id: str) -> None:
    event = LogEvent(1_000, "INFO", "", "router", "a", "b", request_id, "ab")
    assert parsed(event.as_text()) == event


def test_arguments_that_raise_do_not_raise_at_whoever_logs() -> None:
    class Raises:
        def __str__(self) -> str:
            raise RuntimeError

    record = logging.makeLogRecord({"msg": "it is %s", "args": (Raises(),)})
    assert event_of(record, "", "router").message == "it is %s"


class Untold:
    """Raises where it is asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_what_cannot_be_told_at_all_is_a_lost_line_and_raises_nowhere() -> None:
    lines = Lines()
    handler = handled(lines, record(Untold()), record("fine", request_id=Untold()), record("told"))
    assert handler.lost == 2
    assert json.loads(lines.text)["message"] == "told"
