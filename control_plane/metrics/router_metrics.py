"""What the router counts for Prometheus, as it happens. What is only read off when Prometheus asks: `LoopCollector`.

Sessions are observed at their end, from the record that the prefill worker sends with the first token: both TTFTs, when
each event happened, and tokens by what became of them. The names follow Prometheus' conventions: base units, `_total`
for counters. Each router has a registry of its own; vLLM's metrics are not in it.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from rachis.v1 import generation_pb2 as generation

from cluster_core.clock import monotonic_s
from control_plane.metrics.probe_server import Probes, ProbeServer
from control_plane.metrics.recent_ttft import RecentTtft
from control_plane.model.lifecycle import OUTCOMES

# Seconds: from a fraction of an engine step to the longest session.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = tuple(4.0**power for power in range(2, 10))
# Those that alerts go by. They stand at 0 from the start: a counter that begins with 1 has no increase.
_STATUSES = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL")


class RouterMetrics:
    """Observes; `serve` makes it readable at `http://host:port/metrics`.

    ttft_objective_s: is a bucket's bound, so that the share of requests that keep it is exact.
    """

    def __init__(self, ttft_objective_s: float = 5.0) -> None:
        self.registry = CollectorRegistry()
        self._ttft = Histogram(
            "rachis_request_ttft_seconds",
            "Time to first token of requests from their arrival, and of sessions from their finish",
            buckets=sorted({*BUCKETS_S, ttft_objective_s, 2 * ttft_objective_s}),
            registry=self.registry,
        )
        self._outcomes = Counter(
            "rachis_requests_total", "Requests and sessions by how they ended", ["outcome"], registry=self.registry
        )
        self._errors = Counter(
            "rachis_request_errors_total",
            "Requests and sessions that ended with an error, by gRPC status",
            ["status"],
            registry=self.registry,
        )
        self._handoffs = Counter(
            "rachis_handoffs_total",
            "Requests and sessions that got their answer, by what came of the hand-off of their blocks",
            ["outcome"],
            registry=self.registry,
        )
        self._session_ttft = Histogram(
            "rachis_session_ttft_seconds",
            "Time to first token of streaming sessions, from their opening and from their finish",
            ["since"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._events = Histogram(
            "rachis_session_event_seconds",
            "When an event of a streaming session happened, since it was opened in the engine",
            ["event"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._tokens = Histogram(
            "rachis_session_tokens",
            "Prompt tokens of streaming sessions by what became of them",
            ["outcome"],
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._preemptions = Counter(
            "rachis_session_preemptions_total",
            "Preemptions of streaming sessions by what happened to their blocks",
            ["strategy"],
            registry=self.registry,
        )
        self._refusals = Counter(
            "rachis_session_refusals_total",
            "Messages of clients that were refused while their session went on, by status",
            ["status"],
            registry=self.registry,
        )
        for outcome in OUTCOMES:
            self._outcomes.labels(outcome.value)
        for status in _STATUSES:
            self._errors.labels(status)
        for handoff in generation.HandoffOutcome.values()[1:]:
            self._handoffs.labels(_handoff_label(handoff))
        self.recent_ttft = RecentTtft()
        self._server: ProbeServer | None = None
        self.address = ""

    def first_token(self, ttft_s: float) -> None:
        """Of a request since its arrival, of a session since its finish."""
        self._ttft.observe(ttft_s)
        self.recent_ttft.observe(monotonic_s(), ttft_s)

    def completed(self, completion: generation.Completion) -> None:
        """Counts a request or session that got its whole answer."""
        self._handoffs.labels(_handoff_label(completion.route.handoff)).inc()

    def session_ended(self, record: generation.SessionRecord) -> None:
        """Counts a session that got its answer."""
        self._session_ttft.labels("open").observe(record.ttft_from_open_ms / 1000)
        self._session_ttft.labels("finish").observe(record.ttft_from_finish_ms / 1000)
        for event in record.events:
            self._events.labels(_event_label(event.kind)).observe(event.at_ms / 1000)
        for outcome, tokens in _tokens_by_outcome(record.tokens).items():
            self._tokens.labels(outcome).observe(tokens)
        self._preemptions.labels("swap").inc(record.preemptions_swap)
        self._preemptions.labels("recompute").inc(record.preemptions_recompute)

    def request_ended(self, outcome: str) -> None:
        self._outcomes.labels(outcome).inc()

    def failed(self, status: str) -> None:
        """A request or session was answered with this gRPC status."""
        self._errors.labels(status).inc()

    def refused(self, status: str) -> None:
        self._refusals.labels(status).inc()

    def serve(self, host: str, port: int, probes: Probes) -> None:
        """Listens on `host`; port 0 takes a free one. Raises OSError when it cannot."""
        self._server = ProbeServer(host, port, self.registry, probes)
        self.address = f"{host}:{self._server.port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _event_label(kind: generation.SessionEventKind.ValueType) -> str:
    return generation.SessionEventKind.Name(kind).removeprefix("SESSION_EVENT_KIND_").lower()


def _handoff_label(handoff: generation.HandoffOutcome.ValueType) -> str:
    return generation.HandoffOutcome.Name(handoff).removeprefix("HANDOFF_OUTCOME_").lower()


def _tokens_by_outcome(tokens: generation.SessionProgress) -> Mapping[str, int]:
    return {
        "received": tokens.received_tokens,
        "computed": tokens.computed_tokens,
        "reused": tokens.reused_tokens,
        "invalidated": tokens.invalidated_tokens,
    }
