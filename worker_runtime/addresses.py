"""Which address of its host a worker is reached under, and the network interface that it belongs to.

The first three functions are pure: they take the addresses of the host, by interface.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from cluster_core.errors import StartError

Interfaces = Mapping[str, Sequence[str]]

LOOPBACK_INTERFACE = "lo"
RDMA_DEVICES = Path("/sys/class/infiniband")


def own_address(network: str | None, known_as: str, nodes: int, interfaces: Interfaces, node: str) -> str:
    """The address that a worker on `node` listens on and that others find it under.

    network: of `pools.network`; None takes `known_as`, the address that Ray knows the node by. nodes: of the cluster.
    Raises StartError where the node has no address of that network, or others could not reach it.
    """
    if network is None:
        address = known_as
    else:
        found = addresses_in(network, interfaces)
        if not found:
            raise StartError(
                f"node {node} has no address in {network}, only {_listed(interfaces)}; correct pools.network, or the "
                "addresses of that node",
                field="pools.network",
            )
        address = found[0]
    if nodes > 1 and is_loopback(address):
        raise StartError(
            f"node {node} would be reached under {address}, which is loopback, but the Ray cluster has {nodes} nodes; "
            "set pools.network to the network that they share, or start Ray with --node-ip-address",
            field="pools.network",
        )
    return address


def addresses_in(network: str, interfaces: Interfaces) -> list[str]:
    """Those of the host that lie in the network, by the names of their interfaces."""
    wanted = ipaddress.ip_network(network)
    return [
        address
        for name in sorted(interfaces)
        for address in interfaces[name]
        if ipaddress.ip_address(address) in wanted
    ]


def interface_of(address: str, interfaces: Interfaces) -> str | None:
    """None for one that the host reaches the others under without having it, behind NAT for example."""
    return next((name for name, addresses in interfaces.items() if address in addresses), None)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interfaces() -> dict[str, list[str]]:
    """The IP addresses of this host's interfaces that are up."""
    stats = psutil.net_if_stats()
    return {
        name: [entry.address for entry in entries if _is_usable(entry.family, entry.address)]
        for name, entries in psutil.net_if_addrs().items()
        if name not in stats or stats[name].isup
    }


def ucx_devices(host: str, interfaces: Interfaces, rdma_devices: Path = RDMA_DEVICES) -> str | None:
    """The network device that UCX is to keep to, or None where it chooses by itself.

    Left to itself it also takes bridges of containers, whose addresses are the same on every host, for a way to the
    others. RDMA devices are its own to choose: no address tells which of them is near which GPU.
    """
    if is_loopback(host):
        return LOOPBACK_INTERFACE
    has_rdma = rdma_devices.is_dir() and any(rdma_devices.iterdir())
    return None if has_rdma else interface_of(host, interfaces)


def _is_usable(family: int, address: str) -> bool:
    """Addresses of a link only, which bear its name, reach nobody without it."""
    return family in (socket.AF_INET, socket.AF_INET6) and "%" not in address


def _listed(interfaces: Interfaces) -> str:
    found = [f"{address} ({name})" for name in sorted(interfaces) for address in interfaces[name]]
    return ", ".join(found) or "none at all"
