"""Whether anybody keeps a worker: one that outlives its `rachis serve` waits for the next, but not for ever.

It is kept while some `rachis serve` holds the service's name, and it is of use while anything runs on it: routers that
are left may still send requests. A Redis that does not answer keeps nobody.
"""

import asyncio
import logging
from collections.abc import Callable

from rachis import registry
from rachis.redis_client import REDIS_DOWN, RedisClient, not_cancelled

from cluster_core.clock import monotonic_s

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_LOOKS_PER_TIME = 20


class OrphanWatch:
    """Pure. orphan_s: how long a worker that is neither kept nor of use stays."""

    def __init__(self, orphan_s: float, now_s: float) -> None:
        self._orphan_s = orphan_s
        self._since_s = now_s

    def looked(self, now_s: float, *, is_kept: bool, is_idle: bool) -> bool:
        """What was seen; True once it has been so for too long."""
        if is_kept or not is_idle:
            self._since_s = now_s
        return now_s - self._since_s >= self._orphan_s


async def until_orphaned(redis: RedisClient, service_id: str, orphan_s: float, is_idle: Callable[[], bool]) -> None:
    """Returns once nobody keeps the worker. It closes the client."""
    watch = OrphanWatch(orphan_s, monotonic_s())
    try:
        while not_cancelled():
            await asyncio.sleep(min(_LOOK_S, orphan_s / _LOOKS_PER_TIME))
            if watch.looked(monotonic_s(), is_kept=await _is_kept(redis, service_id), is_idle=is_idle()):
                return
    finally:
        await redis.aclose()


async def _is_kept(redis: RedisClient, service_id: str) -> bool:
    try:
        return bool(await redis.exists(registry.lease_key(service_id)))
    except REDIS_DOWN as error:
        logger.debug("whether the service is kept is not known: %s", error)
        return False
