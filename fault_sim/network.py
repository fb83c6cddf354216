"""The simulated network: links between hosts, with latency, cuts and resets.

A connection loses no message: what is sent over a link arrives in order, late, or the calls on it break. While a link
is cut everything waits; a cut longer than `BREAK_S`, as keepalive (`rachis.conventions`) notices it, breaks its calls
at both ends. A reset breaks them at the client at once; their server learns of it later.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

# Keepalive time and timeout of `rachis.conventions.channel_options`.
BREAK_S = 30.0
WINDOW_BYTES = 64 << 10
_LATENCY_S = 0.0005

Action = Callable[[], None]


class LinkedCall(Protocol):
    """What a link knows of the calls on it."""

    def client_lost(self, why: str) -> None: ...
    def server_lost(self) -> None: ...


class Link:
    """Between two hosts, both ways."""

    def __init__(self, rng: Random, latency_s: float) -> None:
        self.rng = rng
        # Factor on its latency.
        self.slow = 1.0
        # Share of messages with which a call breaks.
        self.loss = 0.0
        # Share of unary requests that arrive twice.
        self.repeats = 0.0
        # Its pulls stand still, and neither end is told.
        self.is_frozen = False
        # Of each direction of a call that begins now: what may be on its way and unread before its writer waits.
        self.window_bytes = WINDOW_BYTES
        # A dictionary for its order.
        self.calls: dict[LinkedCall, None] = {}
        self._held: list[Action] = []
        self._breaking: asyncio.TimerHandle | None = None
        self.is_cut = False
        self._latency_s = latency_s

    def delay_s(self) -> float:
        return self._latency_s * self.slow * (1 + self.rng.random())

    def cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self._breaking = asyncio.get_running_loop().call_later(BREAK_S, self._break)

    def heal(self) -> None:
        if self._breaking is not None:
            self._breaking.cancel()
        self.is_cut = False
        held, self._held = self._held, []
        for action in held:
            action()

    def reset(self, noticed_s: float) -> None:
        """All calls break for their clients now, and for their servers so much later."""
        for call in list(self.calls):
            self.lose(call, noticed_s)

    def lose(self, call: LinkedCall, noticed_s: float) -> None:
        asyncio.get_running_loop().call_later(noticed_s, call.server_lost)
        call.client_lost("connection reset by peer")

    def arrive(self, action: Action) -> None:
        if self.is_cut:
            self._held.append(action)
        else:
            action()

    def _break(self) -> None:
        self._held.clear()
        for call in list(self.calls):
            call.server_lost()
            call.client_lost("keepalive watchdog timeout")
        self._breaking = asyncio.get_running_loop().call_later(BREAK_S, self._break)


class Lane:
    """One direction of one call: what is sent arrives in the order it was sent in. Closed, it carries nothing more."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._last_s = 0.0
        self._on_the_way: deque[Action] = deque()
        self._is_closed = False

    def send(self, action: Action) -> None:
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._link.delay_s())
        self._on_the_way.append(action)
        loop.call_at(self._last_s, self._arrive)

    def close(self) -> None:
        self._is_closed = True

    def _arrive(self) -> None:
        self._link.arrive(self._on_the_way.popleft())


class Network:
    """All links, made when they are first used; its users name the hosts. latency_s: of a way, at least."""

    def __init__(self, rng: Random, latency_s: float = _LATENCY_S) -> None:
        self._rng = rng
        self._latency_s = latency_s
        self._links: dict[tuple[str, str], Link] = {}

    def link(self, one: str, other: str) -> Link:
        ends = (min(one, other), max(one, other))
        if ends not in self._links:
            self._links[ends] = Link(self._rng, self._latency_s)
        return self._links[ends]

    def links(self) -> list[Link]:
        return list(self._links.values())
