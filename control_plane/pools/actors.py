"""What the pools need of whoever runs processes."""

from collections.abc import Mapping
from typing import Protocol

from control_plane.model.worker_snapshot import Pool


class Actors(Protocol):
    """The processes of workers, wherever they run."""

    async def start(self, pool: Pool, worker_id: str) -> None:
        """Asks for a process; it may wait for room."""
        ...

    async def failure(self, worker_id: str) -> str:
        """Returns why the worker's first start failed, once it has; never returns where it serves or is stopped."""
        ...

    async def stop(self, worker_id: str) -> None:
        """Ends the engine in order, then the process; a process that does not answer is ended."""
        ...

    async def without_node(self) -> Mapping[str, str]:
        """Those that have no process, by worker id, and why no node takes them; empty where one does."""
        ...
