"""Clients of Redis, made from the configured URL in one place, for a single server and for a Redis Cluster."""

import asyncio
from typing import TypeAlias

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import AuthenticationError, RedisClusterException

RedisClient: TypeAlias = "redis.Redis | RedisCluster"

# What a client raises when Redis does not do what it is asked to. A cluster that cannot be reached at all is no
# `RedisError`.
REDIS_DOWN: tuple[type[Exception], ...] = (redis.RedisError, RedisClusterException, OSError)

_CLUSTER = "+cluster"
# One of the answers of `complaint`.
WRONG_PASSWORD = "refuses the password"


def not_cancelled() -> bool:
    """False once the task that asks has been cancelled: for loops that speak to Redis.

    With a timeout the client sends within `asyncio.wait_for`, which on Python 3.11 may swallow a cancellation that
    comes at the moment it ends; the loop would run on, and whoever waits for its end would wait for ever.
    """
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def complaint(error: Exception) -> str:
    """What Redis does instead of what it is asked to, of one of REDIS_DOWN: the predicate of a sentence on it.

    The client of a cluster wraps a refusal and keeps its words only.
    """
    if isinstance(error, AuthenticationError) or "invalid username-password" in str(error):
        return WRONG_PASSWORD
    return f"does not answer ({error})"


def connect(url: str, timeout_s: float) -> RedisClient:
    """A client that connects when it is first used, and waits so long for a connection or an answer.

    `redis+cluster://` and `rediss+cluster://` name any node of a Redis Cluster; all other URLs are one server's.
    """
    scheme, separator, place = url.partition("://")
    if scheme.endswith(_CLUSTER):
        node = scheme.removesuffix(_CLUSTER) + separator + place
        return RedisCluster.from_url(node, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
