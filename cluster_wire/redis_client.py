"""Clients of Redis, made from the configured URL in one place: for a single server, for a primary that sentinels watch,
and for a Redis Cluster."""

import asyncio
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisClusterException

RedisClient: TypeAlias = "redis.Redis | RedisCluster"

# What a client raises when Redis does not do what it is asked to. A cluster that cannot be reached at all is no
# `RedisError`.
REDIS_DOWN: tuple[type[Exception], ...] = (redis.RedisError, RedisClusterException, OSError)

_CLUSTER = "+cluster"
_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379
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

    `redis+cluster://` and `rediss+cluster://` name any node of a Redis Cluster. `redis+sentinel://` names sentinels and
    what they call the primary: `redis+sentinel://:password@host-a:26379,host-b:26379/primary/0`, where the password is
    the Redis servers' and the database may be left out. All other URLs are one server's. Raises ValueError.
    """
    scheme, separator, place = url.partition("://")
    if scheme.endswith(_SENTINEL):
        return _watched_primary(scheme.removesuffix(_SENTINEL) + separator + place, timeout_s)
    if scheme.endswith(_CLUSTER):
        node = scheme.removesuffix(_CLUSTER) + separator + place
        return RedisCluster.from_url(node, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)


class _Sentinels(Sentinel):
    """Asked one after the other: the library swaps them in its list while it asks; several at once would lose some."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._asking = asyncio.Lock()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        async with self._asking:
            address: tuple[str, int] = await super().discover_master(service_name)
            return address


class _LeavesReplicas(SentinelManagedConnection):
    """What has become a replica is left for the primary, also where it is a script that may not write there.

    The library does so where the refusal is a command's own; a script's has other words.
    """

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except redis.ResponseError as error:
            if "-READONLY " not in str(error):
                raise
            await self.disconnect()
            raise redis.ConnectionError("the primary is a replica now") from None


class _LeavesReplicasOverTls(_LeavesReplicas, SentinelManagedSSLConnection):
    pass


class _WatchedPrimary(redis.Redis):
    """Whichever server the sentinels call the primary, asked with each new connection."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """With the connections to the sentinels, which nobody else has."""
        await super().aclose(close_connection_pool)
        pool = self.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        await pool.sentinel_manager.aclose()


def _watched_primary(url: str, timeout_s: float) -> redis.Redis:
    parts = urlsplit(url)
    name, _, database = parts.path.strip("/").partition("/")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if not name or not all(hosts) or not (database or "0").isdecimal():
        raise ValueError("redis+sentinel:// wants `host:port,host:port/name of the primary/database`")
    sentinels = [(place.hostname, place.port or _SENTINEL_PORT) for place in (urlsplit(f"//{host}") for host in hosts)]
    timeouts: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    connection = _LeavesReplicasOverTls if parts.scheme == "rediss" else _LeavesReplicas
    servers: dict[str, Any] = {"db": int(database or 0), "connection_class": connection, **timeouts}
    # Those that stand before the `@`, whose host is not looked at: a list of them is no host.
    account = urlsplit(f"//{parts.netloc.rpartition('@')[0]}@none") if "@" in parts.netloc else None
    if account is not None:
        servers |= {"username": _plain(account.username), "password": _plain(account.password)}
    # One that does not answer is asked once: there are others.
    asked = {**timeouts, "retry": Retry(NoBackoff(), 0), "ssl": parts.scheme == "rediss"}
    watched = _Sentinels(sentinels, sentinel_kwargs=asked, **servers)
    client: _WatchedPrimary = watched.master_for(name, redis_class=_WatchedPrimary)
    return client


def _plain(part: str | None) -> str | None:
    """As it is written in the URL, with what is escaped there."""
    return unquote(part) if part else None
