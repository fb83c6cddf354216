"""Reading what processes of a service have logged, from the ends of their files: bounded, whatever lies in a folder.

A file belongs to a service where its first lines say so: in Ray's folder lie those of others, too. Lines of libraries,
which are no events, are left out.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Generic, TypeVar

from cluster_core.event_log import LEVELS, LogEvent, beginning, begun_by, end_of, parsed

MOST_FILES = 256
# Of one file, and of all that one query reads.
MOST_READ_BYTES = 1 << 20
MOST_READ_IN_ALL_BYTES = 32 << 20
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


@dataclass(frozen=True, slots=True)
class Told(Generic[Event]):
    """events: the oldest first. left_out: earlier ones that were asked for, where there are more than may be told."""

    events: Sequence[Event]
    left_out: int = 0


ReadLogs = Callable[[LogQuery], Told[LogEvent]]


def read_own(files: Iterable[Path], service: str, query: LogQuery) -> Told[LogEvent]:
    """Of files that this service's processes write, and those of other services may have written before. service: empty
    where they are all told."""
    return latest((event for text in _ends(_newest(files, query)) for event in _ours(_events(text), service)), query)


def read_of_service(folder: Path, pattern: str, service: str, query: LogQuery) -> Told[LogEvent]:
    """Of the files in a folder that processes of this service have begun."""
    files = _newest(folder.glob(pattern), query)
    return latest((event for text in _ends(files, beginning(service)) for event in _events(text)), query)


def latest(events: Iterable[LogEvent], query: LogQuery) -> Told[LogEvent]:
    """Those that are asked for; where there are more than may be told, the latest of them."""
    return last_of(filter(query.takes, events), query.most, _at, _size_bytes)


def last_of(
    events: Iterable[Event], most: int, at_ms: Callable[[Event], int], size_bytes: Callable[[Event], int]
) -> Told[Event]:
    """The latest of them that may be told at once. most: 0 is the usual number."""
    found = 0

    def counted() -> Iterator[Event]:
        nonlocal found
        for found, event in enumerate(events, 1):  # noqa: B007 - it counts
            yield event

    kept, told_bytes = [], 0
    for event in nlargest(min(most or USUAL_EVENTS, MOST_EVENTS), counted(), key=at_ms):
        told_bytes += size_bytes(event)
        if told_bytes > MOST_TOLD_BYTES:
            break
        kept.append(event)
    return Told(sorted(kept, key=at_ms), found - len(kept))


def _events(text: str) -> Iterator[LogEvent]:
    """With the exceptions that stand behind events of text."""
    last: LogEvent | None = None
    behind: list[str] = []
    for line in text.split("\n"):
        event = parsed(line)
        if event is None and last is not None and line.startswith(_EXCEPTION_LINE):
            behind.append(line.removeprefix(_EXCEPTION_LINE))
            continue
        if last is not None:
            yield _with_lines(last, behind)
        last, behind = event, []
    if last is not None:
        yield _with_lines(last, behind)


def _ours(events: Iterable[LogEvent], service: str) -> Iterator[LogEvent]:
    """Those of this service, and those that do not say whose they are."""
    begun = ""
    for event in events:
        told = begun_by(event)
        begun = begun if told is None else told
        if not service or (event.service or begun) in ("", service):
            yield event


def _with_lines(event: LogEvent, lines: Sequence[str]) -> LogEvent:
    """With these behind its exception."""
    if not lines:
        return event
    own = [event.exception] if event.exception else []
    return replace(event, exception=end_of("\n".join([*own, *lines])))


def _newest(files: Iterable[Path], query: LogQuery) -> list[Path]:
    """Those written last, as many as are read at most, and none older than is asked for."""
    dated = []
    for file in files:
        try:
            told = file.lstat()
        except OSError:
            # It has gone meanwhile.
            continue
        if _is_own(told) and told.st_mtime * 1000 >= query.since_ms:
            dated.append((told.st_mtime, file))
    return [file for _, file in nlargest(MOST_FILES, dated)]


def _ends(files: Iterable[Path], head: str = "") -> Iterator[str]:
    """What stands at their ends, until all that may be read is. head: what stands at the beginning of each."""
    left_bytes = MOST_READ_IN_ALL_BYTES
    for path in files:
        with _opened(path) as file:
            if file is None or (head and head not in _part(file, 0, _HEAD_BYTES)):
                continue
            size = os.fstat(file.fileno()).st_size
            most_bytes = min(MOST_READ_BYTES, left_bytes)
            text = _part(file, max(0, size - most_bytes), most_bytes)
        left_bytes -= min(size, most_bytes)
        # The first line of a part is half a line.
        yield text if size <= most_bytes else text.partition("\n")[2]
        if left_bytes <= 0:
            return


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """None for what is no file of this user, also where it became that after its folder was read."""
    try:
        # Whoever opens a pipe waits for who writes into it.
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    with os.fdopen(opened, "rb") as file:
        yield file if _is_own(os.fstat(opened)) else None


def _is_own(told: os.stat_result) -> bool:
    """A file of this user: anybody may write into Ray's folder of logs."""
    return S_ISREG(told.st_mode) and told.st_uid == os.geteuid()


def _part(file: BinaryIO, start: int, most_bytes: int) -> str:
    try:
        file.seek(start)
        return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def _rank(level: str) -> int:
    """What no table knows is told at any level."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _at(event: LogEvent) -> int:
    return event.unix_ms


def _size_bytes(event: LogEvent) -> int:
    return len(event.as_json())
