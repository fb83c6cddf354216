"""A gateway process takes so many WebSocket connections and no more."""

from typing import Any, cast

from starlette.websockets import WebSocket

from cluster_configs.schema import WebSocketSection
from control_plane.gateway.gateway_metrics import GatewayCollector
from control_plane.gateway.socket_endpoint import SocketEndpoint
from control_plane.gateway.stored_responses import StoreCounts
from tests.fakes.responses_socket import GONE, Socket
from tests.fakes.warm_cluster import Cluster, Renderer


class Refused(Socket):
    """Of a client that is turned away."""

    async def send_denial_response(self, response: Any) -> None:
        self.said.put_nowait((response.status_code, response.headers["retry-after"], response.body))


def endpoint_of(max_connections: int) -> SocketEndpoint:
    cluster = Cluster()
    return SocketEndpoint(Renderer(cluster), cluster, None, WebSocketSection(max_connections=max_connections))


async def test_one_more_is_refused_and_one_that_ends_makes_room() -> None:
    endpoint = endpoint_of(1)
    endpoint.connections = 1
    refused = Refused()
    await endpoint.connected(cast(WebSocket, refused))
    status, retry_after, body = refused.said.get_nowait()
    assert (status, retry_after) == (429, "1")
    assert b"too_many_connections" in body
    endpoint.connections = 0
    socket = Socket()
    socket.incoming.put_nowait(GONE)
    await endpoint.connected(cast(WebSocket, socket))
    assert (endpoint.connections, socket.said.qsize()) == (0, 0)


def test_what_is_counted_is_read_off() -> None:
    class Store:
        counts = StoreCounts(stored=2)

    endpoint = endpoint_of(1)
    endpoint.connections, endpoint.sessions.answered = 3, 4
    families = GatewayCollector(endpoint, cast(Any, Store())).collect()
    samples = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}
    assert samples["rachis_gateway_websocket_connections",] == 3
    assert samples["rachis_gateway_sessions_total", "answered"] == 4
    assert samples["rachis_gateway_stored_responses_total", "stored"] == 2
