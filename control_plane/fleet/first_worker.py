"""What the service serves; a router that knows no worker yet waits for the first one.

A router that has just started finds the registry empty where Redis has lost its data: workers register again within a
quarter of their lease. Nobody is refused for that moment.
"""

import asyncio
from contextlib import suppress

from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from control_plane.fleet.membership import Membership


class FirstWorker:
    """changed: notified when other workers may be placed on. most_waiting: more are refused at once."""

    def __init__(self, membership: Membership, changed: asyncio.Condition, timeout_s: float, most_waiting: int) -> None:
        self._membership = membership
        self._changed = changed
        self._timeout_s = timeout_s
        self._most_waiting = most_waiting
        # Requests and sessions, at this moment.
        self.waiting = 0
        self._is_closed = False

    def model_now(self) -> wire.ModelInfo:
        """Raises UnavailableError where no worker has registered."""
        return self._membership.served_model()

    async def model(self) -> wire.ModelInfo:
        """Raises UnavailableError where no worker registers in time, or too many wait for one."""
        try:
            return self.model_now()
        except UnavailableError:
            if self._is_closed or self.waiting >= self._most_waiting:
                raise
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                # The lock is held from one look to the wait, so that no change in between goes unnoticed.
                async with asyncio.timeout(self._timeout_s), self._changed:
                    await self._changed.wait_for(self._is_there)
            return self.model_now()
        finally:
            self.waiting -= 1

    async def close(self) -> None:
        """Nobody is waited for any more."""
        self._is_closed = True
        async with self._changed:
            self._changed.notify_all()

    def _is_there(self) -> bool:
        if self._is_closed:
            return True
        with suppress(UnavailableError):
            self._membership.served_model()
            return True
        return False
