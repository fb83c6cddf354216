"""Copies hot prefixes to further workers: the shell around `control_plane.placement.replication`.

A copy is a prefill of the prefix on the worker that shall hold it, with one token that nobody reads: with the same
fencing and accounting as any request. One at a time. Of all routers of a service the one that holds the
lease in Redis does it; while Redis does not answer nobody does.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.errors import RachisError
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.fleet.worker_client import WorkerClient
from control_plane.placement.placer import Placer
from control_plane.placement.replication import Copy, Replication

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="hot prefixes are not copied while Redis does not answer: %s",
    back="Redis answers again, hot prefixes are copied",
    defect="hot prefixes could not be copied, it is tried again",
    level=logging.INFO,
)

# Taken when it is free, renewed when it is ours. The first write needs no memory: a full Redis lets it through.
HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class CopyTiming:
    """How often a copy is looked for, how long one may take, and how long the lease of the router that copies holds."""

    every_s: float = 1.0
    copy_timeout_s: float = 30.0
    # Longer than a copy takes: the lease is renewed between two.
    lease_ms: int = 40_000


COPY_TIMING = CopyTiming()


class Replicator:
    """`run` until cancelled, then `close`."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        router_id: str,
        placer: Placer,
        workers: WorkerClient,
        plan: Replication,
        *,
        timing: CopyTiming = COPY_TIMING,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._redis = redis
        self._key = registry.replication_key(service_id)
        self._router_id = router_id
        self._placer = placer
        self._workers = workers
        self._timing = timing
        self._now_s = now_s
        self._loop = RedisLoop(self._turn, lambda: asyncio.sleep(timing.every_s), _WORDS)
        self.plan = plan
        # Copies that were made so far, and those that came to nothing.
        self.copies = 0
        self.failed = 0

    async def run(self) -> None:
        # What is copied first can wait as well as what comes next.
        await asyncio.sleep(self._timing.every_s)
        await self._loop.run()

    async def _turn(self) -> None:
        if await self._redis.eval(HOLD, 1, self._key, self._router_id, self._timing.lease_ms):
            await self.step()

    async def close(self) -> None:
        await self._redis.aclose()

    async def step(self) -> Copy | None:
        """Makes the copy that is needed most, if one is."""
        copy = self.plan.next_copy(self._placer.demands(), self._placer.prefill_queues(), self._now_s())
        if copy is None:
            return None
        placement = self._placer.copy_placement(copy)
        if placement is None:
            return None
        request = wire.PrefillRequest(
            request_id=f"copy-{secrets.token_hex(8)}",
            generation=placement.worker.generation,
            token_ids=placement.prompt.token_ids.tolist(),
            sampling=generation.SamplingParams(max_tokens=1, temperature=0.0),
            hand_off=False,
            cache_salt=placement.scope.cache_salt,
            adapter=placement.scope.adapter,
        )
        flight = self._placer.begin(placement)
        try:
            await self._workers.prefill(placement.worker, request, self._timing.copy_timeout_s)
            flight.prefilled()
        except RachisError as error:
            self.failed += 1
            self.plan.failed(copy, self._now_s())
            logger.info("a hot prefix was not copied to %s: %s", copy.worker_id, error)
            return None
        finally:
            flight.end()
        self.plan.made(copy, self._now_s())
        self.copies += 1
        return copy
