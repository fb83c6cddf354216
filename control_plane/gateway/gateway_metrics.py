"""What a gateway process counts beside vLLM's own metrics, read off when Prometheus asks."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.gateway.socket_endpoint import SocketEndpoint
from control_plane.gateway.stored_responses import StoredResponses
from control_plane.metrics.families import counters, gauge


class GatewayCollector(Collector):
    """store: None where no responses are stored."""

    def __init__(self, endpoint: SocketEndpoint, store: StoredResponses | None) -> None:
        self._endpoint = endpoint
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "rachis_gateway_websocket_connections", "WebSocket connections that are open", self._endpoint.connections
        )
        sessions = self._endpoint.sessions
        yield counters(
            "rachis_gateway_sessions",
            "Sessions that computed a prompt while more of it was to come, by what became of them",
            ("outcome",),
            {
                ("opened",): sessions.opened,
                ("answered",): sessions.answered,
                ("cancelled",): sessions.cancelled,
                ("lost",): sessions.lost,
            },
        )
        if self._store is not None:
            counts = self._store.counts
            yield counters(
                "rachis_gateway_stored_responses",
                "Responses that were to be stored, by what became of them",
                ("outcome",),
                {
                    ("stored",): counts.stored,
                    ("too_large",): counts.too_large,
                    ("not_stored",): counts.not_stored,
                },
            )
