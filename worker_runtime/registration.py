"""A worker's registration in Redis: written under a lease, renewed while the worker lives, gone with it.

The record is a `WorkerRegistration`; the lease is the key's own expiry, so a worker that dies without a word leaves
the registry by itself. Redis that does not answer is waited for, never fatal: the engine goes on serving. A worker
whose id another one has taken over leaves the record to that one.
"""

import asyncio
import logging
from collections.abc import Callable

import redis.asyncio as redis
from rachis import registry
from rachis.redis_client import connect, not_cancelled
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import unix_ms

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 4

# Never below the time in milliseconds, so that a registry that lost its data does not repeat a generation.
_NEXT_GENERATION = """
local generation = math.max(redis.call('INCR', KEYS[1]), tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%.0f', generation))
return generation
"""


class Registration:
    """One worker's record. `open` takes a generation, `publish` writes now, `keep` renews until cancelled.

    refresh: brings the record up to date; called before each renewal.
    """

    def __init__(
        self,
        url: str,
        service_id: str,
        record: wire.WorkerRegistration,
        lease_s: float,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._redis = connect(url, lease_s)
        self._service_id = service_id
        self._record = record
        self._lease_s = lease_s
        self._refresh = refresh
        self._changed = asyncio.Event()
        self._is_superseded = False

    async def open(self) -> int:
        """Takes the next generation of the service. Raises redis.RedisError when Redis does not answer."""
        key = registry.generation_key(self._service_id)
        generation = int(await self._redis.eval(_NEXT_GENERATION, 1, key, unix_ms()))
        self._record.generation = generation
        return generation

    def changed(self) -> None:
        """The record was changed: `keep` writes it at once instead of at the next renewal."""
        self._changed.set()

    def superseded(self) -> None:
        """Another worker goes by this one's id: the record is its own from now on."""
        self._is_superseded = True

    async def publish(self) -> None:
        if self._is_superseded:
            return
        self._refresh()
        key = registry.worker_key(self._service_id, self._record.worker_id)
        async with self._redis.pipeline(transaction=True) as batch:
            batch.set(key, self._record.SerializeToString(), px=round(self._lease_s * 1000))
            batch.sadd(registry.workers_key(self._service_id), self._record.worker_id)
            await batch.execute()

    async def keep(self) -> None:
        """Renews the record until cancelled; an outage of Redis is logged once and outlived."""
        lost = False
        while not_cancelled():
            try:
                self._changed.clear()
                await self.publish()
                if lost:
                    logger.warning("the registry answers again")
                lost = False
            except (redis.RedisError, OSError) as error:
                if not lost:
                    logger.warning("the registry does not answer, renewing goes on: %s", error)
                lost = True
            try:
                async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Takes the record out, where Redis still answers."""
        try:
            if not self._is_superseded:
                await self._redis.delete(registry.worker_key(self._service_id, self._record.worker_id))
        except (redis.RedisError, OSError) as error:
            logger.warning("the registration could not be removed, it ends with its lease: %s", error)
        await self._redis.aclose()
