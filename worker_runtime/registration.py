"""A worker's registration in Redis: written under a lease, renewed while the worker lives, gone with it.

The record is a `WorkerRegistration`; the lease is the key's own expiry, so a worker that dies without a word leaves
the registry by itself. Redis that does not answer is waited for, never fatal: the engine goes on serving. A worker
whose id another one has taken over, which has a newer generation, leaves the record to that one.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_wire import registry
from cluster_wire.members import sealed
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from cluster_wire.secret import Secret

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 4

# Redis whose memory is full refuses a script at its first write, unless that one needs no memory; what follows it goes
# through. So each script here begins with a write that changes nothing: a full Redis must not cost the workers' leases.
# Never below Redis's own time in milliseconds, so that a registry that lost its data does not repeat a generation.
# KEYS: counter. ARGV: how long it is kept, in ms. Answers the generation and Redis's time.
NEXT_GENERATION = """
local now = redis.call('TIME')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
local generation = math.max(redis.call('INCR', KEYS[1]), now[1] * 1000 + math.floor(now[2] / 1000))
redis.call('SET', KEYS[1], string.format('%.0f', generation), 'PX', ARGV[1])
return {generation, now[1], now[2]}
"""
# KEYS: record, its generation, worker ids, counter. ARGV: worker id, generation, record, lease in ms,
# how long ids and counter are kept, in ms.
# A counter that was lost goes on after the generations of those who live. Answers 0 for a record that is another
# worker's, and Redis's time.
PUBLISH = """
local now = redis.call('TIME')
local holder = redis.call('GET', KEYS[2])
if holder and tonumber(holder) > tonumber(ARGV[2]) then return {0, now[1], now[2]} end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
redis.call('SADD', KEYS[3], ARGV[1])
if tonumber(redis.call('GET', KEYS[4]) or 0) < tonumber(ARGV[2]) then redis.call('SET', KEYS[4], ARGV[2]) end
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
return {1, now[1], now[2]}
"""
# KEYS: record, its generation. ARGV: generation.
REMOVE = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1], KEYS[2])
"""


class Registration:
    """One worker's record. `open` takes a generation, `publish` writes now, `keep` renews until cancelled.

    record: what is written. refresh: brings it up to date; called before each renewal. clock: learns Redis's time with
    each answer. secret: of the service, that the record is sealed with.
    """

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        record: wire.WorkerRegistration,
        lease_s: float,
        refresh: Callable[[], None] = lambda: None,
        clock: ClusterClock | None = None,
        secret: Secret | None = None,
    ) -> None:
        self._redis = redis
        self._publish, self._remove = map(self._redis.register_script, (PUBLISH, REMOVE))
        self._service_id = service_id
        self._keys = [key(service_id, record.worker_id) for key in (registry.worker_key, registry.holder_key)]
        self.record = record
        self._lease_s = lease_s
        self._refresh = refresh
        self._clock = clock or ClusterClock()
        self._secret = secret
        self._changed = asyncio.Event()
        self._is_superseded = False
        words = LoopWords(
            logger,
            away="the registry does not answer, renewing goes on: %s",
            back="the registry answers again",
            defect=f"the registration of {record.worker_id} could not be renewed",
        )
        self._loop = RedisLoop(self._renew, self._until_due, words)

    async def open(self) -> int:
        """Takes the next generation of the service. Raises one of REDIS_DOWN."""
        key = registry.generation_key(self._service_id)
        generation = await self._timed(self._redis.eval(NEXT_GENERATION, 1, key, registry.KEPT_MS))
        self.record.generation = generation
        return generation

    def changed(self) -> None:
        """The record was changed: `keep` writes it at once instead of at the next renewal."""
        self._changed.set()

    def superseded(self) -> None:
        """Another worker goes by this one's id: the record is its own from now on."""
        self._is_superseded = True

    async def publish(self) -> None:
        """Writes the record, unless it is another worker's by now. Raises one of REDIS_DOWN."""
        if self._is_superseded:
            return
        self._refresh()
        self.record.clock_ahead_ms = self._clock.host_ahead_ms()
        name, generation = self.record.worker_id, self.record.generation
        keys = [*self._keys, registry.workers_key(self._service_id), registry.generation_key(self._service_id)]
        record, lease_ms = sealed(self._secret, self.record.SerializeToString()), round(self._lease_s * 1000)
        args = (name, generation, record, lease_ms, registry.KEPT_MS)
        if not await self._timed(self._publish(keys=keys, args=args)) and not self._is_superseded:
            logger.error("another worker has registered as %s: this one leaves the record to it", name)
            self._is_superseded = True

    async def keep(self) -> None:
        """Renews the record until cancelled; an outage of Redis, and whatever else fails, is logged and outlived."""
        await self._loop.run()

    async def _renew(self) -> None:
        self._changed.clear()
        await self.publish()

    async def _until_due(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE):
                await self._changed.wait()

    async def _timed(self, script: Awaitable[Any]) -> int:
        """What the script answers beside Redis's time."""
        asked_s = monotonic_s()
        answer, seconds, microseconds = map(int, await script)
        self._clock.measured(seconds + microseconds / 1e6, asked_s, monotonic_s())
        return answer

    async def close(self) -> None:
        """Takes the record out, where Redis still answers."""
        try:
            if not self._is_superseded:
                await self._remove(keys=self._keys, args=(self.record.generation,))
        except REDIS_DOWN as error:
            logger.warning("the registration could not be removed, it ends with its lease: %s", error)
        await self._redis.aclose()
