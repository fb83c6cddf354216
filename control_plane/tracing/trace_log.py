"""Traces of late, for people who ask where the time went. Bounded in bytes and in number. Pure.

Two rings, half of the memory each: those of all requests, and those that are notable (failed, migrated, or too slow),
which requests without anything to tell do not push out.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from control_plane.model.memory_use import MemoryUse
from control_plane.model.request_trace import RequestTrace

_MOST_TRACES = 1000
# Of a trace, of a stage and of an event: measured, and rounded up.
_BASE_BYTES = 1200
_STAGE_BYTES = 160
_EVENT_BYTES = 240


def trace_bytes(trace: RequestTrace) -> int:
    """About what it takes."""
    own = _BASE_BYTES + _STAGE_BYTES * len(trace.marks) + _EVENT_BYTES * len(trace.events)
    return own + sum(trace_bytes(choice) for choice in trace.choices)


class _Ring:
    def __init__(self, most_bytes: int) -> None:
        self.traces: deque[RequestTrace] = deque()
        self.bytes = 0
        self._most_bytes = most_bytes

    def add(self, trace: RequestTrace) -> None:
        self.traces.append(trace)
        self.bytes += trace_bytes(trace)
        while self.traces and (len(self.traces) > _MOST_TRACES or self.bytes > self._most_bytes):
            self.bytes -= trace_bytes(self.traces.popleft())


class TraceLog:
    """The last traces that have ended."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._plain = _Ring(most_bytes // 2)
        self._notable = _Ring(most_bytes - most_bytes // 2)

    def add(self, trace: RequestTrace, *, is_notable: bool) -> None:
        (self._notable if is_notable else self._plain).add(trace)

    def latest(self) -> Iterator[RequestTrace]:
        """The last one to end comes first."""
        rings = (reversed(self._plain.traces), reversed(self._notable.traces))
        return heapq.merge(*rings, key=_ended_s, reverse=True)

    def memory(self) -> MemoryUse:
        return MemoryUse("traces", self._plain.bytes + self._notable.bytes, self._most_bytes, "tracing.memory_mib")


def _ended_s(trace: RequestTrace) -> float:
    return trace.ended_s or 0.0


def names(trace: RequestTrace, name: str) -> bool:
    """Whether somebody who says so means it: its request's id, the beginning of it, or the id of its trace."""
    return trace.request_id.startswith(name) or f"{trace.trace_id:032x}" == name


def found(traces: Iterator[RequestTrace], name: str, tenant: str | None) -> RequestTrace | None:
    """The first that is meant; whose id it is goes before those that begin with it. tenant: None: everybody's."""
    by_beginning = None
    for trace in traces:
        if tenant not in (None, trace.tenant) or not names(trace, name):
            continue
        if not name or trace.request_id == name:
            return trace
        by_beginning = by_beginning or trace
    return by_beginning
