"""Reading what processes of a service have logged, from the ends of their files: bounded, whatever lies in a folder.

A file belongs to a service where its first lines say so: in Ray's folder lie those of others, too. Lines of libraries,
which are no events, are left out.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from cluster_core.event_log import LEVELS, MOST_CHARACTERS, LogEvent, beginning, parsed

MOST_FILES = 256
MOST_READ_BYTES = 1 << 20
MOST_EVENTS = 2000
USUAL_EVENTS = 200
# In one answer, whatever stands in the events.
MOST_TOLD_BYTES = 2 << 20
# A process says whose log it is before much else is written.
_HEAD_BYTES = 64 << 10
_EXCEPTION_LINE = "  "

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """As in the message of that name: empty and 0 leave nothing out."""

    request_id: str = ""
    level: str = ""
    since_ms: int = 0
    most: int = USUAL_EVENTS

    def takes(self, event: LogEvent) -> bool:
        if event.unix_ms < self.since_ms or (self.level and _rank(event.level) < _rank(self.level)):
            return False
        return not self.request_id or self.request_id in (event.request_id, event.trace_id)


def read_own(files: Iterable[Path], query: LogQuery) -> list[LogEvent]:
    """Of files that are the service's, whatever they say."""
    return latest((event for file in _newest(files, query) for event in _events(_end(file))), query)


def read_of_service(folder: Path, pattern: str, service: str, query: LogQuery) -> list[LogEvent]:
    """Of the files in a folder that processes of this service have begun."""
    own = (file for file in _newest(folder.glob(pattern), query) if beginning(service) in _head(file))
    return latest((event for file in own for event in _events(_end(file))), query)


def latest(events: Iterable[LogEvent], query: LogQuery) -> list[LogEvent]:
    """Those that are asked for, the oldest first; where there are more than may be, the latest of them."""
    return last_of(filter(query.takes, events), query.most, _at, _size_bytes)


def last_of(
    events: Iterable[Event], most: int, at_ms: Callable[[Event], int], size_bytes: Callable[[Event], int]
) -> list[Event]:
    """The latest of them that may be told at once, the oldest first. most: 0 is the usual number."""
    kept, told_bytes = [], 0
    for event in nlargest(min(most or USUAL_EVENTS, MOST_EVENTS), events, key=at_ms):
        told_bytes += size_bytes(event)
        if told_bytes > MOST_TOLD_BYTES:
            break
        kept.append(event)
    return sorted(kept, key=at_ms)


def _events(text: str) -> Iterator[LogEvent]:
    """With the exceptions that stand behind events of text."""
    last: LogEvent | None = None
    for line in text.split("\n"):
        event = parsed(line)
        if event is None and last is not None and line.startswith(_EXCEPTION_LINE):
            last = _with_line(last, line.removeprefix(_EXCEPTION_LINE))
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _with_line(event: LogEvent, line: str) -> LogEvent:
    """One more of its exception, as far as one may be long."""
    if len(event.exception) + len(line) > MOST_CHARACTERS:
        return event
    return replace(event, exception=f"{event.exception}\n{line}" if event.exception else line)


def _newest(files: Iterable[Path], query: LogQuery) -> list[Path]:
    """Those written last, as many as are read at most: of this user, not by a link, and not older than is asked for."""
    dated = []
    for file in files:
        try:
            told = file.lstat()
        except OSError:
            # It has gone meanwhile.
            continue
        # Whoever opens a pipe waits for who writes into it; and anybody may write into Ray's folder of logs.
        is_own = S_ISREG(told.st_mode) and told.st_uid == os.geteuid()
        if is_own and told.st_mtime * 1000 >= query.since_ms:
            dated.append((told.st_mtime, file))
    return [file for _, file in nlargest(MOST_FILES, dated)]


def _head(file: Path) -> str:
    return _read(file, 0, _HEAD_BYTES)


def _end(file: Path) -> str:
    try:
        size = file.stat().st_size
    except OSError:
        return ""
    text = _read(file, max(0, size - MOST_READ_BYTES), MOST_READ_BYTES)
    # The first line of a part is half a line.
    return text if size <= MOST_READ_BYTES else text.partition("\n")[2]


def _read(file: Path, start: int, most_bytes: int) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(start)
            return opened.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def _rank(level: str) -> int:
    """What no table knows is told at any level."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _at(event: LogEvent) -> int:
    return event.unix_ms


def _size_bytes(event: LogEvent) -> int:
    return len(event.as_json())
