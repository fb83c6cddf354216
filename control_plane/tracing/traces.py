"""The traces of one router: begun with each request, remembered at its end, and given to the exporter where they count.

Which traces are exported is known at their end: those drawn by rate, those whose callers want them (`traceparent`), and
always those that missed the objective, failed or migrated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Protocol

from cluster_core.clock import monotonic_s, unix_s
from cluster_core.objectives import RequestClass, class_of
from control_plane.model.lifecycle import RequestLifecycle, State
from control_plane.model.memory_use import MemoryUse
from control_plane.model.request_trace import ParentSpan, RequestTrace
from control_plane.tracing.trace_log import TraceLog, found

# Outcomes that are somebody else's fault than the client's.
_FAILED = frozenset({State.FAILED.value, State.EXPIRED.value})
DEFAULT_BYTES = 16 << 20


class Exporter(Protocol):
    # Traces that the collector has taken.
    exported: int

    @property
    def dropped(self) -> Mapping[str, int]:
        """By why."""
        ...

    def offer(self, trace: RequestTrace, arrived_unix_s: float) -> None:
        """Takes a trace that has ended, or drops and counts it. Never waits."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TraceRules:
    """rate: the share of traces that is exported whatever they tell. slow_s: by class, a first token that takes longer
    misses the objective."""

    rate: float = 0.0
    slow_s: Mapping[RequestClass, float] = field(default_factory=dict)

    def is_notable(self, trace: RequestTrace) -> bool:
        ttft_s = None if trace.is_resumed else trace.ttft_s
        is_slow = ttft_s is not None and ttft_s > self.slow_s.get(class_of(trace.priority), inf)
        return is_slow or trace.outcome in _FAILED or any(each.migrations for each in (trace, *trace.choices))


class Traces:
    """exporter: None where nobody collects."""

    def __init__(
        self,
        log: TraceLog | None = None,
        rules: TraceRules | None = None,
        exporter: Exporter | None = None,
        rng: Random | None = None,
        now_s: Callable[[], float] = monotonic_s,
        host_unix_s: Callable[[], float] = unix_s,
    ) -> None:
        self._log = log or TraceLog(DEFAULT_BYTES)
        self._rules = rules or TraceRules()
        self._exporter = exporter
        self._rng = rng or Random()
        self._now_s = now_s
        self._host_unix_s = host_unix_s
        self._running: dict[int, RequestLifecycle] = {}

    def begin(self, lifecycle: RequestLifecycle, kind: str, parent: ParentSpan | None) -> None:
        """The request has arrived. parent: the caller's span; of a session it is linked, and its trace another one."""
        trace, rng = lifecycle.trace, self._rng
        trace.begin(self._now_s())
        trace.kind, trace.parent = kind, parent
        is_child = parent is not None and kind != "session"
        trace.trace_id = parent.trace_id if parent is not None and is_child else rng.getrandbits(128) or 1
        trace.span_id = rng.getrandbits(64) or 1
        trace.is_sampled = (parent is not None and parent.is_sampled) or rng.random() < self._rules.rate
        self._running[id(lifecycle)] = lifecycle

    def end(self, lifecycle: RequestLifecycle) -> None:
        """It has one outcome now."""
        self._running.pop(id(lifecycle), None)
        trace = lifecycle.trace
        trace.request_id = str(lifecycle.request_id)
        trace.end(self._now_s(), lifecycle.state.value)
        trace.ended_unix_s = self._host_unix_s()
        is_notable = self._rules.is_notable(trace)
        if self._exporter is not None and (is_notable or trace.is_sampled):
            trace.is_exported = True
            self._exporter.offer(trace, self.arrived_unix_s(trace))
        self._log.add(trace, is_notable=is_notable)

    def find(self, name: str, tenant: str | None) -> RequestTrace | None:
        """As in `GetTraceRequest`; those that run come first. tenant: whose requests may be told of; None: all."""
        return found(self._latest(), name, tenant)

    def running(self, tenant: str | None) -> list[RequestTrace]:
        """The oldest first. tenant: as in `find`."""
        return [trace for trace in self._begun() if tenant in (None, trace.tenant)]

    def ended(self, tenant: str | None) -> Iterator[RequestTrace]:
        """The last one to end first. tenant: as in `find`."""
        return (trace for trace in self._log.latest() if tenant in (None, trace.tenant))

    def arrived_unix_s(self, trace: RequestTrace) -> float:
        """By this host's clock."""
        if trace.ended_s is None:
            return self._host_unix_s() - (self._now_s() - trace.began_s)
        return trace.ended_unix_s - (trace.ended_s - trace.began_s)

    def now_s(self) -> float:
        """On the clock of traces."""
        return self._now_s()

    @property
    def exporter(self) -> Exporter | None:
        """None where nobody collects."""
        return self._exporter

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def memory(self) -> MemoryUse:
        return self._log.memory()

    def _latest(self) -> Iterator[RequestTrace]:
        yield from reversed(self._begun())
        yield from self._log.latest()

    def _begun(self) -> list[RequestTrace]:
        for lifecycle in self._running.values():
            lifecycle.trace.request_id = str(lifecycle.request_id)
        return [lifecycle.trace for lifecycle in self._running.values()]
