"""Makes the servers and channels of one simulation; see the package."""

from collections.abc import Sequence
from typing import Any

from fault_sim.local_grpc.addresses import Addresses, Trace
from fault_sim.local_grpc.client import LocalChannel
from fault_sim.local_grpc.server import LocalServer
from fault_sim.network import Network


class LocalTransport:
    """All servers of one simulation, and the way to them."""

    def __init__(self, network: Network, trace: Trace = lambda line: None) -> None:
        self.network = network
        self._addresses = Addresses(trace)

    def server(self, host: str, interceptors: Sequence[Any] = ()) -> LocalServer:
        return LocalServer(self._addresses, host, interceptors)

    def channel(self, host: str, address: str) -> LocalChannel:
        return LocalChannel(self.network, self._addresses, host, address)
