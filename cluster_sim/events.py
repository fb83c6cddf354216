"""What is still to happen in simulated time, in order; what happens at one time happens in the order it was planned."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class EventQueue:
    """`now_s` is the simulated clock: seconds from 0 on, moved by `run` alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, time_s: float, action: Action) -> None:
        """What lies in the past happens now."""
        self._number += 1
        heapq.heappush(self._planned, (max(time_s, self.now_s), self._number, action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def step(self) -> bool:
        """The next thing happens; False when there is none."""
        if not self._planned:
            return False
        self.now_s, _, action = heapq.heappop(self._planned)
        action()
        return True

    def __len__(self) -> int:
        return len(self._planned)


class Alarm:
    """One thing that is planned again and again: only the last plan counts."""

    def __init__(self, events: EventQueue, action: Action) -> None:
        self._events = events
        self._action = action
        self._set_for = float("inf")

    def set(self, time_s: float) -> None:
        """Infinity: not at all."""
        if time_s == self._set_for:
            return
        self._set_for = time_s
        if time_s < float("inf"):
            self._events.at(time_s, lambda: self._ring(time_s))

    def _ring(self, time_s: float) -> None:
        if time_s == self._set_for:
            self._set_for = float("inf")
            self._action()
