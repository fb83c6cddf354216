"""How full Redis is: asked of the server that has the keys of a service, one of them in a Redis Cluster."""

import re
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from cluster_wire import registry
from cluster_wire.redis_client import RedisClient

# KEYS: one of the service's.
SAY_MEMORY = "return redis.call('INFO', 'memory')"
_FIGURE = re.compile(rb"^(used_memory|maxmemory|maxmemory_policy):(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RedisMemory:
    used_bytes: int
    limit_bytes: int


async def redis_memory(redis: RedisClient, service_id: str) -> RedisMemory | None:
    """None: it has no limit, makes room by itself, or does not say. Raises one of REDIS_DOWN where it is away."""
    asked: Any = redis
    try:
        said = await asked.eval(SAY_MEMORY, 1, registry.workers_key(service_id))
    except ResponseError:
        return None
    figures = dict(_FIGURE.findall(said))
    limit_bytes = int(figures.get(b"maxmemory", 0))
    if not limit_bytes or figures.get(b"maxmemory_policy") != b"noeviction":
        return None
    return RedisMemory(int(figures[b"used_memory"]), limit_bytes)
