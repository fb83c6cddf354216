"""What the router counts for Prometheus, as it happens. What is only read off when Prometheus asks: `LoopCollector`.

Sessions are observed at their end, from the record that the prefill worker sends with the first token: both TTFTs, when
each event happened, and tokens by what became of them. The names follow Prometheus' conventions: base units, `_total`
for counters. Each router has a registry of its own; vLLM's metrics are not in it.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from rachis.v1 import generation_pb2 as generation

from cluster_configs.schema import ObjectivesSection
from cluster_core.clock import monotonic_s
from cluster_core.objectives import ObjectivesByClass, RequestClass, class_of
from cluster_core.ports import address_of
from control_plane.metrics.probe_server import Pages, Probes, ProbeServer
from control_plane.metrics.recent_ttft import RecentTtft
from control_plane.model.lifecycle import OUTCOMES
from control_plane.model.request_trace import RequestTrace

# Seconds: from a fraction of an engine step to the longest session.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS_S = (0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKEN_BUCKETS = tuple(4.0**power for power in range(2, 10))
USUAL_OBJECTIVES = ObjectivesSection().by_class
# Those that alerts go by. They stand at 0 from the start: a counter that begins with 1 has no increase.
_STATUSES = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL")


@dataclass(frozen=True, slots=True)
class _Figure:
    """A counter, or with buckets a histogram."""

    name: str
    help: str
    label: str | None = None
    buckets: Sequence[float] = ()


# The objectives, and twice those, are buckets, so that the share of requests that keep it is exact.
_TTFT = _Figure(
    "rachis_request_ttft_seconds",
    "Time to first token of requests from their arrival, and of sessions from their finish, by class",
    "class",
    BUCKETS_S,
)
_TPOT = _Figure(
    "rachis_request_tpot_seconds",
    "Time for each token after the first, of answers that ended at the router that they began at, by class",
    "class",
    TPOT_BUCKETS_S,
)
_OUTCOMES = _Figure("rachis_requests_total", "Requests and sessions by how they ended", "outcome")
_ERRORS = _Figure(
    "rachis_request_errors_total", "Requests and sessions that ended with an error, by gRPC status", "status"
)
_HANDOFFS = _Figure(
    "rachis_handoffs_total",
    "Requests and sessions that got their answer, by what came of the hand-off of their blocks",
    "outcome",
)
_MIGRATIONS = _Figure(
    "rachis_migrations_total",
    "How often answers that had begun went on elsewhere; of requests and sessions that got their answer",
)
_RESUMED = _Figure(
    "rachis_resumed_requests_total",
    "Requests and sessions whose answers had begun at a router that was gone, and went on at this one",
)
_SESSION_TTFT = _Figure(
    "rachis_session_ttft_seconds",
    "Time to first token of streaming sessions, from their opening and from their finish",
    "since",
    BUCKETS_S,
)
_SESSION_EVENTS = _Figure(
    "rachis_session_event_seconds",
    "When an event of a streaming session happened, since it was opened in the engine",
    "event",
    BUCKETS_S,
)
_SESSION_TOKENS = _Figure(
    "rachis_session_tokens",
    "Prompt tokens of streaming sessions by what became of them",
    "outcome",
    TOKEN_BUCKETS,
)
_PREEMPTIONS = _Figure(
    "rachis_session_preemptions_total",
    "Preemptions of streaming sessions by what happened to their blocks",
    "strategy",
)
_REFUSALS = _Figure(
    "rachis_session_refusals_total",
    "Messages of clients that were refused while their session went on, by status",
    "status",
)
_SLOW_READERS = _Figure(
    "rachis_slow_readers_total",
    "Requests and sessions that ended because their client took nothing of the answer, among the cancelled ones",
)
_LATE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LOOP_STALL = _Figure(
    "rachis_router_loop_stall_seconds",
    "How long the router's event loop was held up by its own work, whenever it was looked at",
    buckets=_LATE_BUCKETS_S,
)
_LOOP_LATE = _Figure(
    "rachis_router_loop_late_seconds",
    "How late the router's event loop was then, waiting for a processor included",
    buckets=_LATE_BUCKETS_S,
)
# In the order in which Prometheus reads them.
_FIGURES = (
    _TTFT,
    _TPOT,
    _OUTCOMES,
    _ERRORS,
    _HANDOFFS,
    _MIGRATIONS,
    _RESUMED,
    _SESSION_TTFT,
    _SESSION_EVENTS,
    _SESSION_TOKENS,
    _PREEMPTIONS,
    _REFUSALS,
    _SLOW_READERS,
    _LOOP_STALL,
    _LOOP_LATE,
)


class Endpoint(Protocol):
    """Where metrics and probes are read."""

    port: int

    def close(self) -> None: ...


# host, port, figures, probes, pages beside them, and what a connection is encrypted with.
MakeEndpoint = Callable[
    [str, int, CollectorRegistry, Probes, Pages | None, Callable[[], ssl.SSLContext] | None], Endpoint
]


class RouterMetrics:
    """Observes; `serve` makes it readable at `http://host:port/metrics`."""

    def __init__(
        self,
        objectives: ObjectivesByClass = USUAL_OBJECTIVES,
        endpoint: MakeEndpoint = ProbeServer,
        now_s: Callable[[], float] = monotonic_s,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """endpoint: serves at a host and a port, from its making until it is closed. tls: with what it is encrypted."""
        self.registry = CollectorRegistry()
        self._counters: dict[_Figure, Counter] = {}
        self._histograms: dict[_Figure, Histogram] = {}
        for figure in _FIGURES:
            labels = [figure.label] if figure.label is not None else []
            if not figure.buckets:
                self._counters[figure] = Counter(figure.name, figure.help, labels, registry=self.registry)
                continue
            buckets = sorted({*figure.buckets, *_bounds(figure, objectives)})
            self._histograms[figure] = Histogram(
                figure.name, figure.help, labels, buckets=buckets, registry=self.registry
            )
        for outcome in OUTCOMES:
            self._counters[_OUTCOMES].labels(outcome.value)
        for status in _STATUSES:
            self._counters[_ERRORS].labels(status)
        for whose in RequestClass:
            self._histograms[_TTFT].labels(whose)
            self._histograms[_TPOT].labels(whose)
        for handoff in generation.HandoffOutcome.values()[1:]:
            self._counters[_HANDOFFS].labels(_handoff_label(handoff))
        self.recent_ttft = RecentTtft()
        self._objectives = objectives
        self._make_endpoint = endpoint
        self._now_s = now_s
        self._endpoint: Endpoint | None = None
        self._tls = tls
        # Empty until it is served.
        self.address = ""
        self.url = ""

    def first_token(self, ttft_s: float, trace: RequestTrace) -> None:
        """Of a request since its arrival, of a session since its finish."""
        whose = class_of(trace.priority)
        self._histograms[_TTFT].labels(whose).observe(ttft_s, self._exemplar(ttft_s, trace))
        # Pools that follow their load go by one objective: the wait of others counts as the same share of that.
        share = self._objectives[RequestClass.INTERACTIVE].ttft_s / self._objectives[whose].ttft_s
        self.recent_ttft.observe(self._now_s(), ttft_s, share)

    def completed(self, completion: generation.Completion, trace: RequestTrace) -> None:
        """Counts a request or session that got its whole answer."""
        later_tokens = completion.usage.completion_tokens - 1
        if later_tokens > 0 and trace.first_token_s is not None and not completion.route.resumed_tokens:
            tpot_s = (self._now_s() - trace.first_token_s) / later_tokens
            self._histograms[_TPOT].labels(class_of(trace.priority)).observe(tpot_s)
        self._counters[_HANDOFFS].labels(_handoff_label(completion.route.handoff)).inc()
        self._counters[_MIGRATIONS].inc(completion.route.migrations)

    def resumed(self) -> None:
        self._counters[_RESUMED].inc()

    def session_ended(self, record: generation.SessionRecord, trace: RequestTrace) -> None:
        """Counts a session that got its answer."""
        from_open_s, from_finish_s = record.ttft_from_open_ms / 1000, record.ttft_from_finish_ms / 1000
        exemplar = self._exemplar(from_finish_s, trace)
        self._histograms[_SESSION_TTFT].labels("open").observe(from_open_s, exemplar)
        self._histograms[_SESSION_TTFT].labels("finish").observe(from_finish_s, exemplar)
        for event in record.events:
            self._histograms[_SESSION_EVENTS].labels(_event_label(event.kind)).observe(event.at_ms / 1000)
        for outcome, tokens in _tokens_by_outcome(record.tokens).items():
            self._histograms[_SESSION_TOKENS].labels(outcome).observe(tokens)
        self._counters[_PREEMPTIONS].labels("swap").inc(record.preemptions_swap)
        self._counters[_PREEMPTIONS].labels("recompute").inc(record.preemptions_recompute)

    def _exemplar(self, ttft_s: float, trace: RequestTrace) -> dict[str, str] | None:
        """The trace that a figure leads to: of those that are sampled, or are kept as they missed the objective."""
        is_kept = trace.is_sampled or ttft_s > self._objectives[class_of(trace.priority)].ttft_s
        return {"trace_id": f"{trace.trace_id:032x}"} if is_kept else None

    def request_ended(self, outcome: str) -> None:
        self._counters[_OUTCOMES].labels(outcome).inc()

    def failed(self, status: str) -> None:
        """A request or session was answered with this gRPC status."""
        self._counters[_ERRORS].labels(status).inc()

    def client_did_not_read(self) -> None:
        self._counters[_SLOW_READERS].inc()

    def loop_came_back(self, late_s: float, worked_s: float) -> None:
        self._histograms[_LOOP_STALL].observe(worked_s)
        self._histograms[_LOOP_LATE].observe(late_s)

    def refused(self, status: str) -> None:
        self._counters[_REFUSALS].labels(status).inc()

    def serve(self, host: str, port: int, probes: Probes, pages: Pages | None = None) -> None:
        """Listens on `host`; port 0 takes a free one. pages: served beside metrics. Raises OSError when it cannot."""
        self._endpoint = self._make_endpoint(host, port, self.registry, probes, pages, self._tls)
        self.address = address_of(host, self._endpoint.port)
        self.url = f"{'http' if self._tls is None else 'https'}://{self.address}/metrics"

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()


def _event_label(kind: generation.SessionEventKind.ValueType) -> str:
    return generation.SessionEventKind.Name(kind).removeprefix("SESSION_EVENT_KIND_").lower()


def _bounds(figure: _Figure, objectives: ObjectivesByClass) -> list[float]:
    """Buckets besides those of the figure: of an objective, and of twice as much."""
    if figure not in (_TTFT, _TPOT):
        return []
    kept = (each.ttft_s if figure is _TTFT else each.tpot_s for each in objectives.values())
    return [bound for objective in kept if objective for bound in (objective, 2 * objective)]


def _handoff_label(handoff: generation.HandoffOutcome.ValueType) -> str:
    return generation.HandoffOutcome.Name(handoff).removeprefix("HANDOFF_OUTCOME_").lower()


def _tokens_by_outcome(tokens: generation.SessionProgress) -> Mapping[str, int]:
    return {
        "received": tokens.received_tokens,
        "computed": tokens.computed_tokens,
        "reused": tokens.reused_tokens,
        "invalidated": tokens.invalidated_tokens,
    }
