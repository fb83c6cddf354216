"""How many workers each pool is meant to have, kept in Redis for the next `rachis serve` that takes the workers over.

A size that was asked for while the service ran holds until the configuration says another one than it did then. Where
Redis may have lost its data, sizes are written again.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from cluster_core.background import BackgroundTasks
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from control_plane.model.limits import MOST_WORKERS
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.pool_sections import LEAST_WORKERS, POOL_NAMES

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class KeptSizes:
    """Of one service. configured: of each pool. losses: how often Redis may have lost its data."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        configured: Mapping[Pool, int],
        losses: Callable[[], int] = lambda: 0,
    ) -> None:
        self._redis = redis
        self._key = registry.sizes_key(service_id)
        self._configured = dict(configured)
        self._losses = losses
        self._written: Mapping[Pool, int] = {}
        # As many losses as there had been by then.
        self._written_after = 0
        self._writing = BackgroundTasks()

    async def read(self) -> dict[Pool, int] | None:
        """What is kept where it still holds, else what is configured. None where Redis does not answer: what was asked
        for is not known."""
        try:
            return held(await self._redis.get(self._key), self._configured)
        except REDIS_DOWN as error:
            logger.warning("sizes of pools that were asked for are not known: %s", error)
            return None

    def keep(self, sizes: Mapping[Pool, int]) -> None:
        """To be called again and again: writes what has changed, or may be lost, once Redis answers. Waits for
        nothing."""
        losses = self._losses()
        if (sizes != self._written or losses != self._written_after) and not self._writing:
            self._writing.start(self._write(dict(sizes), losses))

    async def _write(self, sizes: Mapping[Pool, int], losses: int) -> None:
        kept = {POOL_NAMES[pool]: {"size": size, "configured": self._configured[pool]} for pool, size in sizes.items()}
        try:
            await self._redis.set(self._key, json.dumps(kept))
        except REDIS_DOWN as error:
            logger.debug("sizes of pools could not be kept, it is tried again: %s", error)
            await asyncio.sleep(_RETRY_S)
        else:
            self._written, self._written_after = sizes, losses

    async def close(self) -> None:
        await self._writing.cancel()
        await self._redis.aclose()


def held(kept: bytes | str | None, configured: Mapping[Pool, int]) -> dict[Pool, int]:
    """The size of each pool: what is kept, where it was written under this configuration and is a size."""
    try:
        table = dict(json.loads(kept or b"{}"))
    except (ValueError, TypeError):
        table = {}
    return {
        pool: _size(table.get(POOL_NAMES[pool]), size, LEAST_WORKERS.get(pool, 0)) for pool, size in configured.items()
    }


def _size(kept: Any, configured: int, least: int) -> int:
    if not isinstance(kept, dict) or kept.get("configured") != configured:
        return configured
    size = kept.get("size")
    return size if isinstance(size, int) and least <= size <= MOST_WORKERS else configured
