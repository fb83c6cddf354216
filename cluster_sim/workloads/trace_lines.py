"""The lines of a trace's file: JSON objects that are checked field by field; an error names file, line and field."""

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from cluster_core.errors import InvalidInputError

# No context and no answer is longer; a greater number is a mistake.
MOST_TOKENS = 1 << 30
_MOST_TIME = 1e15
_MOST_LINE_BYTES = 1 << 28
_NO_PREDECESSOR = -1


class TraceError(InvalidInputError):
    """A trace that cannot be; the message names the place. line: counted from 1; 0: the whole file is at fault."""

    def __init__(self, message: str, *, field: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.field = field
        self.line = line


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file. What it checks it returns, or raises TraceError."""

    path: Path
    line: int

    def error(self, field: str, problem: str) -> TraceError:
        place = f"{self.path}, line {self.line}:"
        return TraceError(" ".join(filter(None, (place, field, problem))), field=field, line=self.line)

    def taken(self, row: Mapping[str, Any], field: str) -> Any:
        if field not in row:
            raise self.error(field, "is missing")
        return row[field]

    def whole(self, field: str, value: object, *, at_least: int = 0, at_most: int = MOST_TOKENS, why: str = "") -> int:
        """why: what the upper limit is."""
        # True and False are whole numbers to Python, and not to a trace.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(field, f"must be a whole number, got {reprlib.repr(value)}")
        if not at_least <= value <= at_most:
            raise self.error(field, f"must be from {at_least} to {at_most}{why}, got {reprlib.repr(value)}")
        return value

    def time(self, field: str, value: object, *, at_least: float) -> float:
        """In the unit of the field. Times may stand still, never go back."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(field, f"must be a number, got {reprlib.repr(value)}")
        # Asked this way round, it refuses NaN too.
        if not at_least <= value <= _MOST_TIME:
            raise self.error(
                field, f"must be from {at_least:g} (times never go back) to {_MOST_TIME:g}, got {reprlib.repr(value)}"
            )
        return value

    def listed(self, field: str, value: object) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(field, f"must be a list, got {reprlib.repr(value)}")
        return value

    def require_fit(self, field: str, blocks: int, input_tokens: int, block_tokens: int) -> None:
        fewest, most = input_tokens // block_tokens, -(-input_tokens // block_tokens)
        if not fewest <= blocks <= most:
            limit = f"{fewest}" if fewest == most else f"{fewest} or {most}"
            raise self.error(
                field,
                f"must come to {limit} blocks of {block_tokens} for a prompt of {input_tokens} tokens, got {blocks}",
            )


def lines(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The objects of a file, one a line; empty lines are passed over."""
    found = False
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(_MOST_LINE_BYTES)
                if not line:
                    break
                if line.strip():
                    found = True
                    place = Place(path, number)
                    yield place, _object(place, line)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise TraceError(f"{path} is empty")


def _object(place: Place, line: bytes) -> dict[str, Any]:
    if len(line) == _MOST_LINE_BYTES:
        raise place.error("", f"is longer than {_MOST_LINE_BYTES} bytes")
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise place.error("", f"is not JSON: {error.msg}, column {error.colno}") from error
    # Bad UTF-8 and numbers of thousands of digits; nested too deeply.
    except (ValueError, RecursionError) as error:
        raise place.error("", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise place.error("", f"must be a JSON object, got {reprlib.repr(value)}")
    return value


class Predecessors:
    """That each block stands behind one other block only, or at the start only."""

    def __init__(self) -> None:
        self._predecessor: dict[int, int] = {}

    def check(self, place: Place, field: str, hashes: tuple[int, ...], start: int = 0) -> None:
        """Of the blocks from `start` on."""
        before = hashes[start - 1] if start else _NO_PREDECESSOR
        for at, block in enumerate(islice(hashes, start, None), start):
            if self._predecessor.setdefault(block, before) != before:
                raise place.error(
                    f"{field}[{at}]", "stands behind another block than where it was first, but equal ids must mean "
                    "equal prefixes",
                )  # fmt: skip
            before = block
