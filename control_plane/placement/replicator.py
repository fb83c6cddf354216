"""Copies hot prefixes to further workers: the shell around `control_plane.placement.replication`.

A copy is a prefill of the prefix on the worker that shall hold it, with one token that nobody reads: with the same
fencing and accounting as any request. One at a time. Of all routers of a service the one that holds the
lease in Redis does it; while Redis does not answer nobody does.
"""

import asyncio
import logging
import secrets

from rachis import registry
from rachis.redis_client import REDIS_DOWN, connect, not_cancelled
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.errors import RachisError
from control_plane.fleet.worker_client import WorkerClient
from control_plane.placement.placer import Placer
from control_plane.placement.replication import Copy, Replication

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_COPY_TIMEOUT_S = 30.0
# Longer than a copy takes: it is renewed between two.
_LEASE_MS = 40_000
_REDIS_TIMEOUT_S = 2.0

# Taken when it is free, renewed when it is ours.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class Replicator:
    """`run` until cancelled, then `close`."""

    def __init__(
        self,
        redis_url: str,
        service_id: str,
        router_id: str,
        placer: Placer,
        workers: WorkerClient,
        plan: Replication,
    ) -> None:
        self._redis = connect(redis_url, _REDIS_TIMEOUT_S)
        self._key = registry.replication_key(service_id)
        self._router_id = router_id
        self._placer = placer
        self._workers = workers
        self.plan = plan
        # Made so far, and those that came to nothing.
        self.copies = 0
        self.failed = 0

    async def run(self) -> None:
        while not_cancelled():
            await asyncio.sleep(_INTERVAL_S)
            try:
                if await self._redis.eval(_HOLD, 1, self._key, self._router_id, _LEASE_MS):
                    await self.step()
            except REDIS_DOWN as error:
                logger.info("hot prefixes are not copied while Redis does not answer: %s", error)
            except Exception:
                logger.exception("hot prefixes could not be copied, it is tried again")

    async def close(self) -> None:
        await self._redis.aclose()

    async def step(self) -> Copy | None:
        """Makes the copy that is needed most, if one is."""
        copy = self.plan.next_copy(self._placer.demands(), self._placer.prefill_queues(), monotonic_s())
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
            cache_salt=placement.cache_salt,
        )
        flight = self._placer.begin(placement)
        try:
            await self._workers.prefill(placement.worker, request, _COPY_TIMEOUT_S)
        except RachisError as error:
            self.failed += 1
            self.plan.failed(copy, monotonic_s())
            logger.info("a hot prefix was not copied to %s: %s", copy.worker_id, error)
            return None
        finally:
            flight.end()
        self.plan.made(copy, monotonic_s())
        self.copies += 1
        return copy
