"""Requests whose prompts share prefixes, in one form, read from published traces.

A block is named by one 64-bit number. Equal numbers mean equal prefixes up to and including that block, so that a block
always has the same predecessor; a file that says otherwise is refused. Two formats, told apart by their first line:
- Mooncake (github kvcache-ai/Mooncake, FAST25-release/traces): one request a line, blocks of 512 tokens.
- Sessions (github callanjfox/kv-cache-tester, compacted): one session a line. A row keeps the leading blocks of the row
  before and adds its own; rows of sub-agents stand among the others. Ids are local to a session, so sessions share
  nothing here, although many have a tool list of the same length: what hits between sessions is missing. The data
  does not say when sessions start: they start as a seeded Poisson process, in the order of the file.

A file is read line by line and everything in it is checked: TraceError says in one sentence which line and field cannot
be. A prompt of n tokens has its full blocks, and may have one more for the rest. Seconds count from the trace's start.
"""

import heapq
import math
import random
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.trace_lines import Place, Predecessors, lines

MOONCAKE_BLOCK_TOKENS = 512
SESSIONS_PER_S = 1 / 60
_MOST_BLOCK_TOKENS = 1 << 16
# A session's number stands above its local ids in the 64 bits.
_LOCAL_ID_BITS = 32


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
    require_positive("sessions_per_s", sessions_per_s)
    place, first = next(lines(path))
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


def _mooncake_requests(path: Path) -> Iterator[TraceRequest]:
    predecessors = Predecessors()
    timestamp_ms = 0.0
    for place, row in lines(path):
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
    for number, (place, session) in enumerate(lines(path)):
        if place.taken(session, "bs") != block_tokens:
            raise place.error("bs", f"must be {block_tokens} as on the first line, got {reprlib.repr(session['bs'])}")
        rows = place.listed("r", place.taken(session, "r"))
        if not rows:
            raise place.error("r", "must have at least one row, got none")
        yield start_s, _session_requests(place, number, rows, start_s, block_tokens)
        start_s += rng.expovariate(sessions_per_s)


def _session_requests(
    place: Place, number: int, rows: list[Any], start_s: float, block_tokens: int
) -> Iterator[TraceRequest]:
    predecessors = Predecessors()
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


def require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidInputError(f"must be a finite number above 0, got {value}", field=name)
