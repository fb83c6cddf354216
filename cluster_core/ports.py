"""TCP ports for servers that are given theirs: chosen now, listened on seconds later.

A port that was merely found free is anybody's until then. The system hands it to the next outgoing connection that asks
for any port, the server cannot bind, and vLLM's NIXL listener for one then keeps its engine waiting without a word.
"""

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from cluster_core.errors import StartError

_held: list[socket.socket] = []


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "PortRange":
        """Of `20000-20999`."""
        first, last = map(int, text.split("-"))
        return cls(first, last)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def hold_port(host: str, ports: PortRange | None = None, field: str = "") -> int:
    """A port of `host`, one of `ports` where they are given, that nobody else is given while this process lives.

    It is bound with SO_REUSEADDR and not listened on, so that a server which sets SO_REUSEADDR as well (libzmq, gRPC,
    Redis), in this process or another, can listen on it whenever it is ready, and again after it was restarted. Raises
    StartError, of the setting `field`, when all of them are taken or the host has no such address.
    """
    for port in ports or (0,):
        holders = _bound(host, port, field)
        if holders:
            _held.extend(holders)
            return int(holders[-1].getsockname()[1])
    what = f"port {ports} is taken" if ports and len(ports) == 1 else f"no port of {ports} is free"
    raise StartError(f"{what} on {host}: end what listens there, or choose another", field=field)


def free_ports(host: str, ports: PortRange, wanted: int) -> int:
    """How many of them nobody listens on or holds; no more are looked for than `wanted`.

    Raises StartError when the host has no such address.
    """
    free = 0
    for port in ports:
        if free == wanted:
            break
        holders = _bound(host, port)
        free += bool(holders)
        for holder in holders:
            holder.close()
    return free


def address_of(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bound(host: str, port: int, field: str = "") -> list[socket.socket]:
    """What holds the port; its own socket is the last. Empty where somebody listens on it or holds it already."""
    holders: list[socket.socket] = []
    try:
        # Two that set SO_REUSEADDR and do not listen may have the same port. So a process that wants a certain one
        # claims it by a name that only one process of this network namespace can have, and that goes with the process.
        if port:
            holders.append(socket.socket(socket.AF_UNIX))
            holders[-1].bind(f"\0rachis-port-{port}")
        holders.append(socket.socket(family_of(host)))
        holders[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holders[-1].bind((host, port))
    except OSError as error:
        for holder in holders:
            holder.close()
        if error.errno == errno.EADDRINUSE:
            return []
        raise StartError(f"cannot listen on {host}: {error.strerror or error}", field=field) from None
    return holders
