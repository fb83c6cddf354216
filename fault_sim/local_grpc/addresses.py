"""Which server listens at which address, and on which host: the way of a call from its client to it."""

from collections.abc import Callable
from typing import Protocol

import grpc

from fault_sim.local_grpc.wire import Status, Wire

Trace = Callable[[str], None]


class Listener(Protocol):
    """A server, as a call reaches it."""

    host: str

    def accept(self, wire: Wire) -> None: ...


class Addresses:
    """Of all servers of one simulation. trace: gets a line for each call that arrives."""

    def __init__(self, trace: Trace) -> None:
        self._servers: dict[str, Listener] = {}
        self._hosts: dict[str, str] = {}
        self._trace = trace
        self._next_port = 20_000

    def host_of(self, address: str) -> str:
        """Of the last server that listened there."""
        return self._hosts.get(address, address)

    def bind(self, server: Listener, address: str) -> int:
        """Returns the port: a free one where the address names none. Raises RuntimeError for one that is taken."""
        host, _, port = address.rpartition(":")
        number = int(port)
        if not number:
            self._next_port += 1
            number = self._next_port
        place = f"{host}:{number}"
        if place in self._servers:
            raise RuntimeError(f"Failed to bind to address {place}")
        self._servers[place] = server
        self._hosts[place] = server.host
        return number

    def unbind(self, address: str) -> None:
        self._servers.pop(address, None)

    def arrive(self, address: str, wire: Wire) -> None:
        server = self._servers.get(address)
        self._trace(f"call {wire.method} at {address}")
        if server is None:
            wire.answer(Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {address}: connection refused"))
        else:
            server.accept(wire)
