"""How much of the machine processes take that have nothing to do with a measurement."""

import os
from collections.abc import Mapping

import psutil

from cluster_core.clock import monotonic_s


class ForeignLoad:
    """From its making on: cores taken by processes that are neither this one nor descend from it."""

    def __init__(self) -> None:
        self._began_s = monotonic_s()
        self._before = _foreign_cpu_s()

    def cores(self) -> float:
        """What processes took that have ended meanwhile is not seen."""
        after = _foreign_cpu_s()
        return taken_s(self._before, after) / max(1e-9, monotonic_s() - self._began_s)


def taken_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Both: seconds by process."""
    return sum(max(0.0, seconds - before.get(process, 0.0)) for process, seconds in after.items())


def _foreign_cpu_s() -> dict[int, float]:
    own = {os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))}
    seconds = {}
    for process in psutil.process_iter(["cpu_times"]):
        times = process.info["cpu_times"]
        if process.pid not in own and times is not None:
            seconds[process.pid] = times.user + times.system
    return seconds
