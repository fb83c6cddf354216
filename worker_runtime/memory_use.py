"""How much memory a worker takes, with the processes that its engine has started, and how much its node has left.

In a container the node has no more than the container may take. Pages that several processes share count for each.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from cluster_core.clock import monotonic_s

# To find the children is to read of each process of the host; routers ask for the status often.
_FRESH_S = 5.0
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def own_processes() -> Iterable[psutil.Process]:
    """This one, and those that it and its children have started."""
    own = psutil.Process()
    return own, *own.children(recursive=True)


class ResidentMemory:
    """Of this worker, looked at again once what is known is older than 5 s."""

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]] = own_processes,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._processes = processes
        self._now_s = now_s
        self._at_s: float | None = None
        self._bytes = 0

    def bytes(self) -> int:
        now_s = self._now_s()
        if self._at_s is None or now_s - self._at_s > _FRESH_S:
            self._at_s, self._bytes = now_s, sum(map(_resident_bytes, self._processes()))
        return self._bytes


def node_memory(cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> tuple[int, int]:
    """(bytes in all, bytes available) of this node: those of the host, or of the tightest cgroup (v2) around this
    process where that has less."""
    host = psutil.virtual_memory()
    limits = list(_cgroup_memory(cgroups, own_cgroup))
    return min([host.total, *(most for most, _ in limits)]), min([host.available, *(left for _, left in limits)])


def _cgroup_memory(cgroups: Path, own_cgroup: Path) -> Iterable[tuple[int, int]]:
    """(limit, what is left of it) in bytes, of each cgroup around this process that has a limit."""
    try:
        own = next(line[3:] for line in own_cgroup.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    # In a container the path may be one outside of it; its own limit is at the root of what is mounted there.
    at = cgroups / os.path.normpath(own).lstrip("/")
    for folder in (at, *at.parents):
        if not folder.is_relative_to(cgroups):
            return
        try:
            most, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # There is no limit (`max`), or no such file.
            continue
        # The kernel takes back pages of files, as it does of the host's.
        files = sum(int(stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
        yield most, min(most, max(0, most - used + files))


def _resident_bytes(process: psutil.Process) -> int:
    """0 of one that has ended meanwhile."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
