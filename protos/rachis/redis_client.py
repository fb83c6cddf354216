"""Clients of Redis, made from the configured URL in one place, for a single server and for a Redis Cluster."""

from typing import TypeAlias

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster

RedisClient: TypeAlias = "redis.Redis | RedisCluster"

_CLUSTER = "+cluster"


def connect(url: str, timeout_s: float) -> RedisClient:
    """A client that connects when it is first used, and waits so long for a connection or an answer.

    `redis+cluster://` and `rediss+cluster://` name any node of a Redis Cluster; all other URLs are one server's.
    """
    scheme, separator, place = url.partition("://")
    if scheme.endswith(_CLUSTER):
        node = scheme.removesuffix(_CLUSTER) + separator + place
        return RedisCluster.from_url(node, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
