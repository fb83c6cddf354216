"""Requests whose prompts share prefixes, in one form: read from published traces, or generated.

A block is named by one 64-bit number. Equal numbers mean equal prefixes up to and including that block, so that a block
always has the same predecessor; a file that says otherwise is refused. Two formats, told apart by their first line:
- Mooncake (github kvcache-ai/Mooncake, FAST25-release/traces): one request a line, blocks of 512 tokens.
- Sessions (github callanjfox/kv-cache-tester, compacted): one session a line. A row keeps the leading blocks of the row
  before and adds its own; rows of sub-agents stand among the others. Ids are local to a session, so sessions share
  nothing here, although many have a tool list of the same length: what hits between sessions is missing. The data
  does not say when sessions start: they start as a seeded Poisson process, in the order of the file.

A file is read line by line and everything in it is checked: TraceError says in one sentence which line and field cannot
be. A prompt of n tokens has its full blocks, and may have one more for the rest. Seconds count from the trace's start.
Generated traces: see `generated`.
"""

import heapq
import json
import math
import random
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from cluster_core.errors import InvalidInputError

MOONCAKE_BLOCK_TOKENS = 512
SESSIONS_PER_S = 1 / 60
# No context and no answer is longer; a greater number is a mistake.
MOST_TOKENS = 1 << 30
_MOST_BLOCK_TOKENS = 1 << 16
_MOST_TIME = 1e15
_MOST_LINE_BYTES = 1 << 28
# A session's number stands above its local ids in the 64 bits.
_LOCAL_ID_BITS = 32
_NO_PREDECESSOR = -1


class TraceError(InvalidInputError):
    """A trace that cannot be; the message names the place. line: counted from 1; 0: the whole file is at fault."""

    def __init__(self, message: str, *, field: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.field = field
        self.line = line


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """hashes: one for each block of the prompt, in order; the last block may be a partial one."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """requests: by arrival."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace that stays on disk: each iteration reads it from its start and yields requests by arrival.

    Raises TraceError where it comes to a line that cannot be.
    """

    name: str
    block_tokens: int
    reader: Callable[[], Iterator[TraceRequest]]

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.reader()

    def read(self) -> Trace:
        return Trace(self.name, self.block_tokens, tuple(self))


def read_trace(path: Path, *, sessions_per_s: float = SESSIONS_PER_S, seed: int = 0) -> Trace:
    """The whole trace in memory: about 8 bytes for each block of each request. Arguments as for `open_trace`."""
    return open_trace(path, sessions_per_s=sessions_per_s, seed=seed).read()


def open_trace(path: Path, *, sessions_per_s: float = SESSIONS_PER_S, seed: int = 0) -> TraceFile:
    """Looks at the first line only. sessions_per_s and seed: when sessions start; other formats have arrivals.

    Raises TraceError for a file that is not of a known format, InvalidInputError for a rate that is none.
    """
    _require_positive("sessions_per_s", sessions_per_s)
    place, first = next(_lines(path))
    if "hash_ids" in first:
        return TraceFile(path.stem, MOONCAKE_BLOCK_TOKENS, lambda: _mooncake_requests(path))
    if "bs" in first and "r" in first:
        block_tokens = place.whole("bs", first["bs"], at_least=1, at_most=_MOST_BLOCK_TOKENS)
        return TraceFile(
            path.stem, block_tokens, lambda: _interleaved(_sessions(path, block_tokens, sessions_per_s, seed))
        )
    raise place.error(
        "", "is of no known format: a Mooncake request has timestamp, input_length, output_length and hash_ids, "
        "a session has bs and r",
    )  # fmt: skip


def full_blocks_only(trace: Trace | TraceFile) -> TraceFile:
    """The same requests without the partial blocks at the ends of their prompts, which no engine shares."""

    def requests() -> Iterator[TraceRequest]:
        for request in trace:
            yield replace(request, hashes=request.hashes[: request.input_tokens // trace.block_tokens])

    return TraceFile(trace.name, trace.block_tokens, requests)


# Reading a line


@dataclass(frozen=True, slots=True)
class _Place:
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


def _lines(path: Path) -> Iterator[tuple[_Place, dict[str, Any]]]:
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
                    place = _Place(path, number)
                    yield place, _object(place, line)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise TraceError(f"{path} is empty")


def _object(place: _Place, line: bytes) -> dict[str, Any]:
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


class _Predecessors:
    """That each block stands behind one other block only, or at the start only."""

    def __init__(self) -> None:
        self._predecessor: dict[int, int] = {}

    def check(self, place: _Place, field: str, hashes: tuple[int, ...], start: int = 0) -> None:
        """Of the blocks from `start` on."""
        before = hashes[start - 1] if start else _NO_PREDECESSOR
        for at, block in enumerate(islice(hashes, start, None), start):
            if self._predecessor.setdefault(block, before) != before:
                raise place.error(
                    f"{field}[{at}]", "stands behind another block than where it was first, but equal ids must mean "
                    "equal prefixes",
                )  # fmt: skip
            before = block


# The formats


def _mooncake_requests(path: Path) -> Iterator[TraceRequest]:
    predecessors = _Predecessors()
    timestamp_ms = 0.0
    for place, row in _lines(path):
        timestamp_ms = place.time("timestamp", place.taken(row, "timestamp"), at_least=timestamp_ms)
        input_tokens = place.whole("input_length", place.taken(row, "input_length"), at_least=1)
        output_tokens = place.whole("output_length", place.taken(row, "output_length"))
        ids = place.listed("hash_ids", place.taken(row, "hash_ids"))
        hashes = tuple(place.whole(f"hash_ids[{at}]", each, at_most=(1 << 64) - 1) for at, each in enumerate(ids))
        place.require_fit("hash_ids", len(hashes), input_tokens, MOONCAKE_BLOCK_TOKENS)
        predecessors.check(place, "hash_ids", hashes)
        yield TraceRequest(timestamp_ms / 1000, input_tokens, output_tokens, hashes)


def _sessions(
    path: Path, block_tokens: int, sessions_per_s: float, seed: int
) -> Iterator[tuple[float, Iterator[TraceRequest]]]:
    """Start and requests of each session."""
    rng = random.Random(seed)
    start_s = 0.0
    for number, (place, session) in enumerate(_lines(path)):
        if place.taken(session, "bs") != block_tokens:
            raise place.error("bs", f"must be {block_tokens} as on the first line, got {reprlib.repr(session['bs'])}")
        rows = place.listed("r", place.taken(session, "r"))
        if not rows:
            raise place.error("r", "must have at least one row, got none")
        yield start_s, _session_requests(place, number, rows, start_s, block_tokens)
        start_s += rng.expovariate(sessions_per_s)


def _session_requests(
    place: _Place, number: int, rows: list[Any], start_s: float, block_tokens: int
) -> Iterator[TraceRequest]:
    predecessors = _Predecessors()
    at_s = 0.0
    hashes: tuple[int, ...] = ()
    for index, row in enumerate(rows):
        field = f"r[{index}]"
        if len(place.listed(field, row)) < 6:
            raise place.error(field, f"must be [t_s, depth, in_tokens, out_tokens, keep, new_ids, ...], got {len(row)}")
        at_s = place.time(f"{field}.t_s", row[0], at_least=at_s)
        input_tokens = place.whole(f"{field}.in_tokens", row[2], at_least=1)
        output_tokens = place.whole(f"{field}.out_tokens", row[3])
        keep = place.whole(f"{field}.keep", row[4], at_most=len(hashes), why=", the blocks of the row before")
        new = place.listed(f"{field}.new_ids", row[5])
        hashes = hashes[:keep] + tuple(
            number << _LOCAL_ID_BITS | place.whole(f"{field}.new_ids[{at}]", each, at_most=(1 << _LOCAL_ID_BITS) - 1)
            for at, each in enumerate(new)
        )
        place.require_fit(f"{field}.keep and new_ids", len(hashes), input_tokens, block_tokens)
        predecessors.check(place, f"{field}.blocks", hashes, start=keep)
        yield TraceRequest(start_s + at_s, input_tokens, output_tokens, hashes)


def _interleaved(sessions: Iterator[tuple[float, Iterator[TraceRequest]]]) -> Iterator[TraceRequest]:
    """By arrival; only sessions that have started are held. Sessions come by start, their requests by arrival."""
    running: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]] = []

    def advance(number: int, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            heapq.heappush(running, (request.arrival_s, number, request, requests))

    for number, (start_s, requests) in enumerate(sessions):
        while running and running[0][0] < start_s:
            _, earlier, request, rest = heapq.heappop(running)
            yield request
            advance(earlier, rest)
        advance(number, requests)
    while running:
        _, earlier, request, rest = heapq.heappop(running)
        yield request
        advance(earlier, rest)


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidInputError(f"must be a finite number above 0, got {value}", field=name)


# Generated traces


@dataclass(frozen=True, slots=True)
class FewShotShape:
    """A benchmark whose questions are asked behind the worked examples of their group.

    queries: of each group. input_tokens_mean: of a prompt, examples and question together.
    """

    name: str
    queries: tuple[int, ...]
    input_tokens_mean: int
    shots: int
    chain_of_thought: bool = False

    @property
    def question_tokens_mean(self) -> float:
        """Assumed: a worked example is as long as a question, and twice as long where it has a chain of thought."""
        return self.input_tokens_mean / (self.shots * (2 if self.chain_of_thought else 1) + 1)

    @property
    def examples_tokens_mean(self) -> float:
        return self.input_tokens_mean - self.question_tokens_mean


# HotPrefix (doi 10.1145/3749168), section 5.1, has the mean lengths, the shots of the first two, and one output token
# for MMLU. Its introduction exchanges the lengths of MMLU and BBH. Groups and queries are those of the public test sets
# (Hellaswag: validation). Assumed: 3 shots for BBH and 5 for CEVAL, as their authors ask; subjects of CEVAL of equal
# size; one group for Hellaswag, which has no subjects.
SHAPES: Mapping[str, FewShotShape] = {
    shape.name: shape
    for shape in (
        FewShotShape(
            "mmlu", (
                100, 135, 152, 100, 265, 144, 100, 100, 100, 173, 102, 100, 235, 114, 145, 378, 126, 100, 310, 203,
                100, 165, 198, 193, 390, 270, 238, 151, 545, 216, 204, 237, 223, 131, 121, 108, 163, 112, 103, 234,
                100, 783, 346, 895, 306, 311, 324, 282, 1534, 272, 612, 110, 245, 201, 100, 166, 171,
            ), 567, shots=5,
        ),
        FewShotShape("hellaswag", (10_042,), 753, shots=10),
        FewShotShape("bbh", (250,) * 24 + (187, 178, 146), 723, shots=3, chain_of_thought=True),
        FewShotShape("ceval", (238,) * 18 + (237,) * 34, 1673, shots=5, chain_of_thought=True),
    )
}  # fmt: skip

# Assumed: lengths lie evenly between these parts of their mean.
_SPREAD = (0.5, 1.5)


def generated(
    shape: FewShotShape,
    *,
    requests: int | None = None,
    noise_share: float = 0.0,
    requests_per_s: float = 10.0,
    block_tokens: int = 16,
    seed: int = 0,
) -> Trace:
    """The queries of a shape, shuffled as in HotPrefix: all, or the first so many. Depends on its arguments alone.

    Each is the examples of its group and a question of its own; only full blocks of examples are shared, and groups
    share nothing. noise_share: of all requests, have a prompt of the same mean length that nobody else has. Assumed,
    where the paper sends batches: Poisson arrivals, and a chain of thought of output as long as the question.
    Raises InvalidInputError for arguments that cannot be, and for more queries than the shape has.
    """
    total = sum(shape.queries) if requests is None else requests
    _require_positive("requests", total)
    _require_positive("requests_per_s", requests_per_s)
    _require_positive("block_tokens", block_tokens)
    if not 0 <= noise_share <= 1:
        raise InvalidInputError(f"must be from 0 to 1, got {noise_share}", field="noise_share")
    noise = round(total * noise_share)
    if total - noise > sum(shape.queries):
        raise InvalidInputError(f"{shape.name} has {sum(shape.queries)} queries, not {total - noise}", field="requests")
    rng = random.Random(seed)
    fresh = count()
    examples = [(tokens, tuple(islice(fresh, tokens // block_tokens))) for tokens in _examples_tokens(rng, shape)]
    queries = [group for group, size in enumerate(shape.queries) for _ in range(size)]
    rng.shuffle(queries)
    order: list[int | None] = [*queries[: total - noise], *[None] * noise]
    rng.shuffle(order)

    drawn: list[TraceRequest] = []
    arrival_s = 0.0
    for group in order:
        question_tokens = max(1, round(shape.question_tokens_mean * rng.uniform(*_SPREAD)))
        examples_tokens, shared = (_noise_tokens(rng, shape), ()) if group is None else examples[group]
        input_tokens = examples_tokens + question_tokens
        own = islice(fresh, -(-input_tokens // block_tokens) - len(shared))
        output_tokens = question_tokens if shape.chain_of_thought else 1
        drawn.append(TraceRequest(arrival_s, input_tokens, output_tokens, (*shared, *own)))
        arrival_s += rng.expovariate(requests_per_s)
    return Trace(shape.name, block_tokens, tuple(drawn))


def _noise_tokens(rng: random.Random, shape: FewShotShape) -> int:
    """Of a one-off prompt, in place of the examples."""
    return round(shape.examples_tokens_mean * rng.uniform(*_SPREAD))


def _examples_tokens(rng: random.Random, shape: FewShotShape) -> list[int]:
    """Of each group, scaled so that the mean over all queries is the shape's, however they fall among the groups."""
    factors = [rng.uniform(*_SPREAD) for _ in shape.queries]
    mean = sum(factor * size for factor, size in zip(factors, shape.queries, strict=True)) / sum(shape.queries)
    return [round(shape.examples_tokens_mean * factor / mean) for factor in factors]
