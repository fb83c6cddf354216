"""Links between workers: a transfer gets its equal share of both links that it crosses, the smaller of the two."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster_sim.events import Alarm, EventQueue


@dataclass(slots=True, eq=False)
class Link:
    """One worker's link in one direction. factor: of its bandwidth, what is left of it; 0: nothing passes."""

    bytes_per_s: float
    factor: float = 1.0
    # In the order in which they began.
    transfers: dict["Transfer", None] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Bytes a second for each of its transfers."""
        return self.bytes_per_s * self.factor / max(1, len(self.transfers))


class Transfer:
    """Under way from `Network.start` to `done` or `cancel`."""

    def __init__(self, network: "Network", links: tuple[Link, Link], size: float, done: Callable[[], None]) -> None:
        self._network = network
        self._links = links
        self._left = size
        self._rate = 0.0
        self._since_s = network.events.now_s
        self._done = done
        self._flows = False
        self._alarm = Alarm(network.events, self._go_on)

    def begin_at(self, time_s: float) -> None:
        self._alarm.set(time_s)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._alarm.set(float("inf"))
        self._leave()

    def adjust(self) -> None:
        """Its share may have changed."""
        now_s = self._network.events.now_s
        self._left -= self._rate * (now_s - self._since_s)
        self._since_s = now_s
        self._rate = min(link.share for link in self._links)
        self._alarm.set(now_s + max(0.0, self._left) / self._rate if self._rate else float("inf"))

    def _go_on(self) -> None:
        if self._flows:
            self._leave()
            self._done()
            return
        self._flows, self._since_s = True, self._network.events.now_s
        for link in self._links:
            link.transfers[self] = None
        self._network.adjust(self._links)

    def _leave(self) -> None:
        for link in self._links:
            link.transfers.pop(self, None)
        self._network.adjust(self._links)


class Network:
    """latency_s: of each transfer, before its first byte."""

    def __init__(self, events: EventQueue, latency_s: float) -> None:
        self.events = events
        self._latency_s = latency_s

    def start(self, source: Link, target: Link, size: float, done: Callable[[], None]) -> Transfer:
        """size: bytes. `done` is called when the last of them has come."""
        transfer = Transfer(self, (source, target), size, done)
        transfer.begin_at(self.events.now_s + self._latency_s)
        return transfer

    def adjust(self, links: tuple[Link, Link]) -> None:
        """Of all that crosses these links."""
        for transfer in dict.fromkeys([*links[0].transfers, *links[1].transfers]):
            transfer.adjust()
