"""Routers tell each other through Redis what they have on each worker, so that several place as one does.

Each writes its own field of one hash again and again, with a number that grows, and reads those of the others. While
Redis does not answer each goes by its own requests alone, as it does after a defect, and for what the others have sent
since they were heard of last. It is done as often as it has to be for placement, and no oftener than a small part of
the loop's time allows; a router that is alone looks seldom whether it still is.
"""

import asyncio
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.fleet.membership import Membership
from control_plane.fleet.other_routers import SILENT_ROUNDS

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="Redis does not answer, placement knows of this router's requests alone: %s",
    back="Redis answers again, placement knows of the other routers' requests",
    defect="loads cannot be shared with other routers",
    level=logging.INFO,
)
_LEASE_MS = 60_000
# KEYS: fields of the routers. ARGV: whose, what it has, how long they are kept, in ms. The first write needs no memory:
# a full Redis lets it through.
TELL = """
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
_ALONE_S = 0.25
_MOST_OF_THE_LOOP = 0.05


class LoadSharing:
    """`follow` until cancelled, then `close`. damaged: fields that could not be read."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        membership: Membership,
        *,
        router_id: str,
        every_s: float,
        roles: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """router_id: another one with each start. roles: prefill_rate and prefill_heavy of `RouterLoads`."""
        self._redis = redis
        self._key = registry.loads_key(service_id)
        self._membership = membership
        self._router_id = router_id
        self._roles = roles
        self._now_s = now_s
        self._number = 0
        self._every_s = every_s
        # What the last round took of the loop.
        self._took_s = 0.0
        self._loop = RedisLoop(self.share, self._pause, _WORDS, on_outage=self._forget, on_defect=self._forget)
        self.damaged = 0

    async def follow(self) -> None:
        await self._loop.run()

    async def close(self) -> None:
        try:
            await self._redis.hdel(self._key, self._router_id)
        except REDIS_DOWN:
            logger.debug("the others notice by themselves that this router is gone")
        await self._redis.aclose()

    async def share(self) -> None:
        """Writes what this router has, reads what the others have. Raises one of REDIS_DOWN."""
        self._number += 1
        began_s = self._now_s()
        own = self._membership.shares(began_s)
        prefill_rate, prefill_heavy = self._roles()
        told = wire.RouterLoads(
            number=self._number, workers=own, prefill_rate=prefill_rate, prefill_heavy=prefill_heavy
        ).SerializeToString()
        wrote_s = self._now_s()
        async with self._redis.pipeline(transaction=False) as pipeline:
            lease_ms = max(_LEASE_MS, round(SILENT_ROUNDS * self._every_s * 1000))
            pipeline.eval(TELL, 1, self._key, self._router_id, told, lease_ms)
            pipeline.hgetall(self._key)
            *_, fields = await pipeline.execute()
        now_s, others = self._now_s(), self._membership.others
        names = {raw.decode(): value for raw, value in fields.items() if raw.decode() != self._router_id}
        for name, value in names.items():
            try:
                others.heard(name, wire.RouterLoads.FromString(value), now_s)
            except DecodeError:
                self.damaged += 1
        silent = others.forget_silent(names, now_s, every_s=self._every_s)
        self._took_s = wrote_s - began_s + self._now_s() - now_s
        if silent:
            await self._redis.hdel(self._key, *silent)

    async def _pause(self) -> None:
        alone_s = 0.0 if len(self._membership.others) else _ALONE_S
        await asyncio.sleep(max(self._every_s, alone_s, self._took_s / _MOST_OF_THE_LOOP))

    async def _forget(self) -> None:
        """Nothing new is heard of the others."""
        self._membership.others.forget_silent((), self._now_s())
