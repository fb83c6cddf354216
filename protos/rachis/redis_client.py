"""Clients of Redis, made from the configured URL in one place, for a single server and for a Redis Cluster."""

import asyncio
from typing import TypeAlias

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException

RedisClient: TypeAlias = "redis.Redis | RedisCluster"

# What a client raises when Redis does not do what it is asked to. A cluster that cannot be reached at all is no
# `RedisError`.
REDIS_DOWN: tuple[type[Exception], ...] = (redis.RedisError, RedisClusterException, OSError)

_CLUSTER = "+cluster"


def not_cancelled() -> bool:
    """False once the task that asks has been cancelled: for loops that speak to Redis.

    With a timeout the client sends within `asyncio.wait_for`, which on Python 3.11 may swallow a cancellation that
    comes at the moment it ends; the loop would run on, and whoever waits for its end would wait for ever.
    """
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def connect(url: str, timeout_s: float) -> RedisClient:
    """A client that connects when it is first used, and waits so long for a connection or an answer.

    `redis+cluster://` and `rediss+cluster://` name any node of a Redis Cluster; all other URLs are one server's.
    """
    scheme, separator, place = url.partition("://")
    if scheme.endswith(_CLUSTER):
        node = scheme.removesuffix(_CLUSTER) + separator + place
        return RedisCluster.from_url(node, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
