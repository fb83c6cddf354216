"""What processes log: one line for each event, as text or as JSON, with the request that it is about.

Whoever logs uses `logging` as everybody does. The ids of the request come from the task that logs (`about`) or from
`extra`. What a client sends has no place in a message; a line break in one is written as two characters, so that no
message looks like two. A line that cannot be written, on a full disk or to a reader that has gone, is lost and counted.
"""

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# Of a message, and of an exception.
MOST_CHARACTERS = 8192
MOST_FILE_BYTES = 16 << 20
# Whose level is the configured one.
OWN_PACKAGES = (
    "cluster_configs", "cluster_core", "cluster_wire", "command_line", "control_plane", "decode_worker", "imitated_gpu",
    "kv_transfer", "prefill_worker", "shared_worker", "worker_runtime",
)  # fmt: skip
# Of a line in text: time, level, process, logger, message, and what it is about.
_TEXT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) +(?P<process>\S+) (?P<logger>\S+): "
    r"(?P<message>.*?)(?: \[request (?P<request_id>[^\s\]]+?)(?:, trace (?P<trace_id>\w+))?\])?"
)
_BEGINNING = re.compile(r"the log of a process(?: of service (?P<service>.+))? begins")
_IN_AN_ID = "/:@!$&'()*+;=?~"
_about: ContextVar[tuple[str, str]] = ContextVar("about", default=("", ""))
# Of a request: what it is called outside of this process, and its trace; by the attempt's id, which its engine knows.
_attempts: dict[str, tuple[str, str]] = {}


@dataclass(frozen=True, slots=True)
class LogEvent:
    """service: empty where it was read from text. exception: with its traceback, in lines; of text empty."""

    unix_ms: int
    level: str
    service: str
    process: str
    logger: str
    message: str
    request_id: str = ""
    trace_id: str = ""
    exception: str = ""

    def as_json(self) -> str:
        """One line; of what it is about only what there is."""
        told = {"time": _iso(self.unix_ms), **asdict(self)}
        del told["unix_ms"]
        return json.dumps({name: value for name, value in told.items() if value != ""})

    def as_text(self) -> str:
        """One line, and behind it those of an exception, each with two spaces in front."""
        trace = f", trace {self.trace_id}" if self.trace_id else ""
        # A client's own id may have blanks and brackets.
        ids = f" [request {quote(self.request_id, _IN_AN_ID)}{trace}]" if self.request_id else ""
        rest = "".join(f"\n  {line}" for line in self.exception.splitlines())
        return f"{_iso(self.unix_ms)} {self.level:<7} {self.process} {self.logger}: {self.message}{ids}{rest}"


@dataclass(frozen=True, slots=True)
class LogRules:
    """level: the least that is logged. form: `text` or `json`."""

    level: str = "WARNING"
    form: str = "text"


class Stream(Protocol):
    """Raises OSError or ValueError where it cannot write."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class LogFile:
    """A file of its owner alone, begun anew when it is full; the one before stays as `.1`."""

    def __init__(self, path: Path, most_bytes: int = MOST_FILE_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        # What was written last is half a line.
        self._is_torn = False

    def write(self, text: str) -> int:
        """Raises OSError, also where the disk has become full within the line; the next begins a line of its own."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > self._most_bytes:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        # Opened for each line: lines are few, and whatever moves the file away finds it closed.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        line = f"\n{text}".encode() if self._is_torn else text.encode()
        try:
            self._is_torn = os.write(file, line) < len(line)
        finally:
            os.close(file)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(text)

    def flush(self) -> None:
        """What is written is with the system already."""


class EventHandler(logging.Handler):
    """Writes events; stream None: to standard error, whatever that is at that time. Never raises."""

    def __init__(self, service: str, process: str, *, as_json: bool, stream: Stream | None = None) -> None:
        super().__init__()
        self.service = service
        self._process = process
        self._as_json = as_json
        self.stream = stream
        # Lines that could not be written.
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        stream = self.stream or sys.stderr
        before = getattr(stream, "lost", 0)
        try:
            event = event_of(record, self.service, self._process)
            stream.write(f"{event.as_json() if self._as_json else event.as_text()}\n")
            stream.flush()
        except Exception:  # noqa: BLE001 - what is logged may raise anything where it is asked for its text
            # Or the disk is full, or the process was started without standard error, which is None then.
            self.lost += 1
        else:
            # A stream that loses lines by itself says how many.
            self.lost += getattr(stream, "lost", 0) > before


def set_up(
    service: str, process: str, rules: LogRules, file: Path | None = None, *, only_there: bool = False
) -> list[EventHandler]:
    """From now on this process logs so, to standard error and to `file`. only_there: to `file` alone."""
    streams: list[Stream | None] = [] if only_there else [None]
    if file is not None:
        streams.append(LogFile(file))
    handlers = [EventHandler(service, process, as_json=rules.form == "json", stream=stream) for stream in streams]
    set_levels(logging.getLevelName(rules.level))
    root = logging.getLogger()
    for handler in handlers:
        root.addHandler(handler)
        handler.emit(logging.makeLogRecord({"name": __name__, "msg": beginning(service), "levelname": "INFO"}))
    return handlers


def set_levels(level: int) -> None:
    """level: the least that our own packages log."""
    # Libraries say much below a warning, and some of it of what they are given.
    logging.getLogger().setLevel(max(logging.WARNING, level))
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(level)


@contextmanager
def logged(
    service: str, process: str, rules: LogRules, file: Path | None = None, *, only_there: bool = False
) -> Iterator[None]:
    """As `set_up`, while the block runs."""
    root = logging.getLogger()
    level = root.level
    handlers = set_up(service, process, rules, file, only_there=only_there)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        root.setLevel(level)
        for package in OWN_PACKAGES:
            logging.getLogger(package).setLevel(logging.NOTSET)


def beginning(service: str) -> str:
    """What the first line of each log says, whatever its level: to whom it belongs."""
    return f"the log of a process of service {service} begins" if service else "the log of a process begins"


def begun_by(event: LogEvent) -> str | None:
    """The service of the process whose log this event begins, empty where it is of none; None where it begins none."""
    found = _BEGINNING.fullmatch(event.message) if event.logger == __name__ else None
    return found and (found["service"] or "")


def look_first(at: logging.Filter) -> None:
    """From now on this process logs what that leaves of a record, wherever it writes."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, EventHandler):
            handler.addFilter(at)


def lost_lines() -> int:
    """That this process could not write since `set_up`."""
    return sum(handler.lost for handler in logging.getLogger().handlers if isinstance(handler, EventHandler))


def log_file() -> tuple[Path, str] | None:
    """That this process writes, and its service."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, EventHandler) and isinstance(handler.stream, LogFile):
            return handler.stream.path, handler.service
    return None


def about(request_id: str, trace_id: str = "") -> None:
    """What this task, and those that it starts from now on, log about."""
    _about.set((request_id, trace_id))


@contextmanager
def attempt(attempt_id: str, request_id: str, trace_id: str) -> Iterator[None]:
    """As `about`; and what other threads log under the attempt's id meanwhile is about the request as well."""
    names = (request_id or attempt_id, trace_id)
    about(*names)
    # Whoever calls a second time with an id that is taken is refused by the engine.
    _attempts.setdefault(attempt_id, names)
    try:
        yield
    finally:
        if _attempts.get(attempt_id) is names:
            del _attempts[attempt_id]


def event_of(record: logging.LogRecord, service: str, process: str) -> LogEvent:
    request_id, trace_id = _names_of(record)
    return LogEvent(
        int(record.created * 1000),
        record.levelname,
        service,
        process,
        record.name,
        _one_line(message_of(record)),
        request_id,
        trace_id,
        end_of(_exception_of(record)),
    )


def _names_of(record: logging.LogRecord) -> tuple[str, str]:
    """Of the request that it is about, and of its trace. An engine's own id of an attempt has an ending behind it."""
    request_id, trace_id = _about.get()
    given = str(getattr(record, "request_id", request_id))
    known = _attempts.get(given) or _attempts.get(given.rpartition("-")[0]) if given else None
    return known or (given, str(getattr(record, "trace_id", trace_id)))


def parsed(line: str) -> LogEvent | None:
    """The event of a line of either form; None where it is of neither."""
    if line.startswith("{"):
        return _of_json(line)
    found = _TEXT.fullmatch(line.rstrip("\n"))
    at_ms = _told_ms(found["time"]) if found is not None else None
    if found is None or at_ms is None:
        return None
    return LogEvent(
        at_ms,
        found["level"],
        "",
        found["process"],
        found["logger"],
        found["message"],
        unquote(found["request_id"] or ""),
        found["trace_id"] or "",
    )


def _of_json(line: str) -> LogEvent | None:
    names = ("level", "service", "process", "logger", "message", "request_id", "trace_id", "exception")
    try:
        told = json.loads(line)
        at_ms = _told_ms(told["time"])
        # Half a character is none that a message can carry.
        values = (str(told.get(name, "")).encode("utf-8", "replace").decode() for name in names)
        return LogEvent(at_ms, *values) if at_ms is not None else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _exception_of(record: logging.LogRecord) -> str:
    """That of a record of another process has come as text."""
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text or ""


def message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - what is logged may raise anything where it is asked for its text
        # Its arguments do not fit.
        return str(record.msg)


def end_of(exception: str) -> str:
    """As far as one may be long: why it was raised is what it says last."""
    return exception if len(exception) <= MOST_CHARACTERS else f"…{exception[1 - MOST_CHARACTERS :]}"


def _one_line(message: str) -> str:
    return _short(message.replace("\r", "\\r").replace("\n", "\\n"))


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def _told_ms(time: object) -> int | None:
    """None for what is no time since 1970."""
    try:
        at_ms = round(datetime.fromisoformat(str(time)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return at_ms if at_ms >= 0 else None
