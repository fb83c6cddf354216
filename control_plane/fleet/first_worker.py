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
    """changed: notified when the registry was read. most_waiting: more are refused at once."""

    def __init__(self, membership: Membership, changed: asyncio.Condition, timeout_s: float, most_waiting: int) -> None:
        self._membership = membership
        self._changed = changed
        self._timeout_s = timeout_s
        self._most_waiting = most_waiting
        self._waiting = 0

    async def model(self) -> wire.ModelInfo:
        """Raises UnavailableError where no worker registers in time, or too many wait for one."""
        with suppress(UnavailableError):
            return self._membership.served_model()
        if self._waiting >= self._most_waiting:
            return self._membership.served_model()
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._changed:
                while True:
                    await self._changed.wait()
                    with suppress(UnavailableError):
                        return self._membership.served_model()
        except TimeoutError:
            return self._membership.served_model()
        finally:
            self._waiting -= 1
