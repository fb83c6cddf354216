"""What becomes of the workers when their `rachis serve` ends.

    who ends                                                        its workers
    one whose workers do not outlive it                             end
    one that was told to leave them                                 stay
    one whose name another one has, or may have by now              stay: they are that one's
    one that took workers over and has not come up                  stay: they serve other routers
    any other                                                       end

Those that stay and that nobody takes over end by themselves after `service.orphan_s`.
"""

import logging

from cluster_configs.schema import RachisConfig
from control_plane.pools.life import Pools
from control_plane.service.lease import ServiceLease

logger = logging.getLogger(__name__)


class WorkersEnd:
    """Of one service. taken_over: it took workers of a former start over."""

    def __init__(self, config: RachisConfig, pools: Pools, lease: ServiceLease, *, taken_over: bool) -> None:
        self._config = config
        self._pools = pools
        self._lease = lease
        self._taken_over = taken_over
        # To be set once the service has come up.
        self.is_up = False

    async def run(self) -> None:
        await self._pools.stop(leave_workers=self._config.workers_outlive_serve and await self._stay())

    async def _stay(self) -> bool:
        service = self._config.service
        if service.leave_workers:
            return True
        stay = (self._taken_over and not self.is_up) or not await self._lease.is_ours()
        if stay:
            logger.warning(
                "the workers stay; who is not taken over ends after %g s (service.orphan_s)", service.orphan_s
            )
        return stay
