"""Keeps a worker out of the registry whose process or host Ray has given up.

A host that was cut off may come back and its worker with it, before that worker hears that it counts as dead: it would
register again, get requests, and be ended under them. The holder of its name is therefore set to a generation above its
own. The next start of the worker has at least that one, and registers as ever.
"""

import logging

from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient

logger = logging.getLogger(__name__)

# By then a host that comes back has heard that it was given up: Ray says so with its first word.
_KEPT_S = 3600

# KEYS: record, its generation. ARGV: the first generation that counts, seconds.
FENCE = """
local holder = redis.call('GET', KEYS[2])
if holder and tonumber(holder) >= tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
return 1
"""


class Fence:
    """Of one service."""

    def __init__(self, redis: RedisClient, service_id: str) -> None:
        self._redis = redis
        self._service_id = service_id

    async def close_out(self, worker_id: str, generation: int) -> bool:
        """From now on no start of the worker up to this generation registers; False: Redis does not answer."""
        keys = [registry.worker_key(self._service_id, worker_id), registry.holder_key(self._service_id, worker_id)]
        try:
            await self._redis.eval(FENCE, len(keys), *keys, generation + 1, _KEPT_S)
        except REDIS_DOWN as error:
            logger.warning("%s cannot be kept out of the registry: %s", worker_id, error)
            return False
        return True

    async def close(self) -> None:
        await self._redis.aclose()
