"""The one place that reads the clocks.

Durations come from the monotonic clock; only deadlines that travel between hosts use Unix time.
Cores take `now` as an argument instead of a clock.
"""

import time
from typing import NewType

UnixMs = NewType("UnixMs", int)


def monotonic_s() -> float:
    """Seconds on a clock that never goes back; meaningful within this process only."""
    return time.monotonic()


def unix_ms() -> UnixMs:
    """Milliseconds since 1970, comparable between hosts whose clocks are synchronised."""
    return UnixMs(time.time_ns() // 1_000_000)


def cpu_s() -> float:
    """CPU seconds that this process has used."""
    return time.process_time()
