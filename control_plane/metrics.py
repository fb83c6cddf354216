"""What the router counts for Prometheus, and the endpoint where it is read.

Sessions are observed at their end, from the record that the prefill worker sends with the first token: both TTFTs, when
each event happened, and tokens by what became of them. The names follow Prometheus' conventions: base units, `_total`
for counters. Each router has a registry of its own; vLLM's metrics are not in it. What the workers report is:
see `control_plane.worker_metrics`.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from rachis.v1 import generation_pb2 as generation

# Seconds: from a fraction of an engine step to the longest session.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = tuple(4.0**power for power in range(2, 10))


class RouterMetrics:
    """Observes; `serve` makes it readable at `http://host:port/metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = Histogram(
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
        self._outcomes = Counter(
            "rachis_requests_total", "Requests and sessions by how they ended", ["outcome"], registry=self.registry
        )
        self._refusals = Counter(
            "rachis_session_refusals_total",
            "Messages of clients that were refused while their session went on, by status",
            ["status"],
            registry=self.registry,
        )
        self._server: Any = None
        self.address = ""

    def session_ended(self, record: generation.SessionRecord) -> None:
        """Counts a session that got its answer."""
        self._ttft.labels("open").observe(record.ttft_from_open_ms / 1000)
        self._ttft.labels("finish").observe(record.ttft_from_finish_ms / 1000)
        for event in record.events:
            self._events.labels(_event_name(event.kind)).observe(event.at_ms / 1000)
        for outcome, tokens in _tokens_by_outcome(record.tokens).items():
            self._tokens.labels(outcome).observe(tokens)
        self._preemptions.labels("swap").inc(record.preemptions_swap)
        self._preemptions.labels("recompute").inc(record.preemptions_recompute)

    def request_ended(self, outcome: str) -> None:
        self._outcomes.labels(outcome).inc()

    def refused(self, status: str) -> None:
        self._refusals.labels(status).inc()

    def serve(self, host: str, port: int) -> None:
        """Listens on `host`; port 0 takes a free one. Raises OSError when it cannot."""
        self._server, _ = start_http_server(port, host, self.registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _event_name(kind: generation.SessionEventKind.ValueType) -> str:
    return generation.SessionEventKind.Name(kind).removeprefix("SESSION_EVENT_KIND_").lower()


def _tokens_by_outcome(tokens: generation.SessionProgress) -> Mapping[str, int]:
    return {
        "received": tokens.received_tokens,
        "computed": tokens.computed_tokens,
        "reused": tokens.reused_tokens,
        "invalidated": tokens.invalidated_tokens,
    }
