"""`grpc.aio` in one process: servers and channels that the generated stubs and servicers cannot tell from real ones.

What the project relies on is here, and checked against real gRPC by the same contract tests: all four kinds of calls,
interceptors, deadlines at both ends, cancelling that reaches the server, aborts with details and trailing metadata, a
bounded window in each direction, graceful stops, and calls that break. Messages are serialised and parsed as in truth.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from fault_sim.local_client import LocalChannel
from fault_sim.local_server import LocalServer
from fault_sim.local_wire import Status, Wire
from fault_sim.network import Network

Trace = Callable[[str], None]


class LocalTransport:
    """All servers of one simulation, and the way to them."""

    def __init__(self, network: Network, trace: Trace = lambda line: None) -> None:
        self.network = network
        self.servers: dict[str, LocalServer] = {}
        self._hosts: dict[str, str] = {}
        self._trace = trace
        self._next_port = 20_000

    def server(self, host: str, interceptors: Sequence[Any] = ()) -> LocalServer:
        return LocalServer(self, host, interceptors)

    def channel(self, host: str, address: str) -> LocalChannel:
        return LocalChannel(self, host, address)

    def host_of(self, address: str) -> str:
        return self._hosts.get(address, address)

    def bind(self, server: LocalServer, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port)
        if not number:
            self._next_port += 1
            number = self._next_port
        place = f"{host}:{number}"
        if place in self.servers:
            raise RuntimeError(f"Failed to bind to address {place}")
        self.servers[place] = server
        self._hosts[place] = server.host
        return number

    def arrive(self, address: str, wire: Wire) -> None:
        server = self.servers.get(address)
        self._trace(f"call {wire.method} at {address}")
        if server is None:
            wire.answer(Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {address}: connection refused"))
        else:
            server.accept(wire)
