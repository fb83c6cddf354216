"""Whether anybody keeps a worker: one that outlives its `rachis serve` waits for the next, but not for ever.

It is kept while a `rachis serve` holds the service's name that takes over workers of this Redis, and it is of use while
anything comes to it: routers that are left may still send requests. Of a Redis that does not answer nothing is known:
that time counts for a quarter.
"""

import asyncio
import json
import logging
from collections.abc import Callable

from cluster_core.clock import monotonic_s
from cluster_core.ids import registry_digest
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient, not_cancelled

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_LOOKS_PER_TIME = 20
_UNKNOWN_COUNTS = 0.25


class OrphanWatch:
    """Pure. orphan_s: how long a worker that is neither kept nor of use stays."""

    def __init__(self, orphan_s: float, now_s: float) -> None:
        self._orphan_s = orphan_s
        self._last_s = now_s
        self._alone_s = 0.0
        self._work: object = None

    def looked(self, now_s: float, *, is_kept: bool | None, work: object) -> bool:
        """What was seen; True once it has been so for too long. is_kept: None where that is not known.

        work: whatever is another value where anything has come, None while anything runs.
        """
        is_of_use = work is None or work != self._work
        counts = 1.0 if is_kept is not None else _UNKNOWN_COUNTS
        self._alone_s = 0.0 if is_kept or is_of_use else self._alone_s + counts * (now_s - self._last_s)
        self._last_s, self._work = now_s, work
        return self._alone_s >= self._orphan_s


class Keeper:
    """Who keeps the workers of a service on this Redis."""

    def __init__(self, redis: RedisClient, service_id: str, redis_url: str) -> None:
        self._redis = redis
        self._key = registry.lease_key(service_id)
        self._registry = registry_digest(redis_url)

    async def is_there(self) -> bool | None:
        """None where Redis does not answer."""
        try:
            value = await self._redis.get(self._key)
        except REDIS_DOWN as error:
            logger.debug("whether the service is kept is not known: %s", error)
            return None
        try:
            return bool(json.loads(value or b"{}").get("keeps") == self._registry)
        except (ValueError, AttributeError):
            return False

    async def close(self) -> None:
        await self._redis.aclose()


async def until_orphaned(
    keeper: Keeper,
    orphan_s: float,
    work: Callable[[], object],
    *,
    look_s: float = _LOOK_S,
    now_s: Callable[[], float] = monotonic_s,
) -> None:
    """Returns once nobody keeps the worker. A look that fails is as good as none. It closes the keeper.

    look_s: at most from one look to the next.
    """
    watch = OrphanWatch(orphan_s, now_s())
    try:
        while not_cancelled():
            await asyncio.sleep(min(look_s, orphan_s / _LOOKS_PER_TIME))
            try:
                if watch.looked(now_s(), is_kept=await keeper.is_there(), work=work()):
                    return
            except Exception:
                logger.exception("it could not be looked who keeps this worker")
    finally:
        await keeper.close()
