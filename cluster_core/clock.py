"""The one place that reads the clocks.

Durations come from the monotonic clock; only what travels between hosts uses Unix time, and that of a `ClusterClock`.
Cores take `now` as an argument instead of a clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

# How far two clocks that run freely drift apart, in seconds of each second: more than quartz does.
_DRIFT = 2e-4

UnixMs = NewType("UnixMs", int)


def monotonic_s() -> float:
    """Seconds on a clock that never goes back; meaningful within this process only."""
    return time.monotonic()


def unix_ms() -> UnixMs:
    """Milliseconds since 1970 by this host's clock, which may be wrong; see `ClusterClock`."""
    return UnixMs(time.time_ns() // 1_000_000)


def unix_s() -> float:
    """The same, in seconds."""
    return time.time()


def cpu_s() -> float:
    """CPU seconds that this process has used."""
    return time.process_time()


@dataclass(frozen=True, slots=True)
class _Measurement:
    """ahead_s: of the shared clock over the monotonic one, right within `error_s` when it was measured."""

    ahead_s: float
    error_s: float
    measured_s: float

    def error_at(self, now_s: float) -> float:
        return self.error_s + _DRIFT * abs(now_s - self.measured_s)


class ClusterClock:
    """Unix time by the clock that all hosts of a service share, Redis's, as far as this process knows it.

    A process that asks Redis for the time knows it within half of the round trip. The best measurement counts, worth
    less the older it is; one that contradicts it shows that Redis's clock was set, or that another server answers, and
    replaces it. In between the monotonic clock goes on, whatever Redis does. Before the first one it is this host's
    time.

    host_unix_ms: this host's clock. now_s: its monotonic clock. Measured on one thread, read on any.
    """

    def __init__(self, host_unix_ms: Callable[[], UnixMs] = unix_ms, now_s: Callable[[], float] = monotonic_s) -> None:
        self._host_unix_ms = host_unix_ms
        self.now_s = now_s
        began_s = now_s()
        self._best = _Measurement(host_unix_ms() / 1000 - began_s, float("inf"), began_s)

    def measured(self, server_s: float, asked_s: float, answered_s: float) -> float:
        """The server had that Unix time at some moment between these two of the monotonic clock.

        Returns by how much that sets this clock, in s.
        """
        error_s = (answered_s - asked_s) / 2
        fresh = _Measurement(server_s - (asked_s + answered_s) / 2, error_s, answered_s)
        known_s = self._best.error_at(answered_s)
        by_s = fresh.ahead_s - self._best.ahead_s
        if error_s > known_s and abs(by_s) <= error_s + known_s:
            return 0.0
        self._best = fresh
        return by_s

    def unix_s(self) -> float:
        return self.now_s() + self._best.ahead_s

    def unix_ms(self) -> UnixMs:
        return UnixMs(round(self.unix_s() * 1000))

    def error_s(self) -> float:
        """By how much it may be wrong; infinite before the first measurement."""
        return self._best.error_at(self.now_s())

    def host_ahead_ms(self) -> int:
        """How far this host's own clock is ahead of the shared one."""
        return self._host_unix_ms() - self.unix_ms()
