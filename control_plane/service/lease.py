"""The name of a service on one Redis: one `rachis serve` has it, a second one is refused.

    who has the name           until
    the one that took it       it gives it back, or has not renewed it for `LEASE_S`
    nobody                     somebody takes it

Redis that is away, or has lost its data, takes the name from nobody who goes on asking. One that died without a word
is waited for: its lease is not renewed any more, and ends. Where it ran on this machine its end can be seen, and nobody
waits. One that was held up for longer than its lease may find that another one has the name: it has lost it.
"""

import asyncio
import json
import logging
import math
import os
import secrets
import socket
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

from cluster_configs.loading import masked
from cluster_core.clock import monotonic_s, unix_ms
from cluster_core.errors import StartError
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient, complaint
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.service.process_identity import began_ticks, machine

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="the name of the service could not be renewed, it is tried again: %s",
    back="the name of the service is renewed again",
    defect="the name of the service could not be renewed, it is tried again",
)

LEASE_S = 12.0
# Of one question whose answer is not waited for any longer.
_ANSWER_S = 5.0
RENEWALS_PER_LEASE = 4
_LOOK_S = 0.25

# Takes the name where it is free, renews it where it is ours: nil. Else who has it, and for how many ms. Its first
# write needs no memory: a Redis that is full lets it through.
# KEYS: lease. ARGV: our value, its time in ms.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {holder, redis.call('PTTL', KEYS[1])} end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
# KEYS: lease. ARGV: our value.
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class ServiceLease:
    """`take`, then `keep` until cancelled, then `give_back`. lease_s: another one for tests."""

    def __init__(
        self, redis: RedisClient, place: str, service_id: str, *, keeps: str = "", lease_s: float = LEASE_S
    ) -> None:
        """place: the URL of that Redis, for people. keeps: digest of the registry whose workers it takes over."""
        self._redis = redis
        self._place = masked(place)
        self._service_id = service_id
        self._key = registry.lease_key(service_id)
        self._lease_s = lease_s
        self._interval_s = lease_s / RENEWALS_PER_LEASE
        # When the renewal was asked for that was the last one to succeed.
        self._renewed_s = -math.inf
        self._loop = RedisLoop(self._renew, lambda: asyncio.sleep(self._interval_s), _WORDS)
        # Set once another one has the name.
        self.lost = asyncio.Event()
        # No two are equal, not even of one process id on two hosts of one name.
        self._value = json.dumps(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_began": began_ticks(os.getpid()),
                "keeps": keeps,
                "machine": machine(),
                "since_ms": unix_ms(),
                "nonce": secrets.token_hex(8),
            }
        ).encode()

    async def take(self) -> None:
        """Raises StartError where Redis does not answer, and where another one has the name and renews it."""
        left_ms: int | None = None
        until_s = monotonic_s() + 2 * self._lease_s
        while (held := await self._asked(self._hold())) is not None:
            holder, now_left_ms = held
            if _has_ended_here(holder):
                await self._asked(self._redis.eval(_GIVE_BACK, 1, self._key, holder))
                continue
            if monotonic_s() > until_s or (left_ms is not None and now_left_ms > left_ms):
                raise StartError(
                    f"{_described(self._service_id, holder)} on the Redis at {self._place}; stop that one, or give "
                    "this one another service.name",
                    field="service.name",
                )
            left_ms = now_left_ms
            await asyncio.sleep(_LOOK_S)

    async def check(self) -> None:
        """Raises StartError where another one has the name by now: this one may have been held up."""
        held = await self._asked(self._hold())
        if held is not None:
            self.lost.set()
            raise StartError(f"{_described(self._service_id, held[0])} by now", field="service.name")

    async def is_ours(self) -> bool:
        """Whether nobody else can have the name. Where Redis is silent: while the last renewal lasts."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._renew()
        except REDIS_DOWN as error:
            is_held = monotonic_s() - self._renewed_s < self._lease_s
            if not is_held:
                logger.warning("another one may have the name of the service by now, Redis does not say: %s", error)
            return is_held and not self.lost.is_set()
        return not self.lost.is_set()

    async def keep(self) -> None:
        """Renews it; goes on while Redis is away, and sets `lost` where another one has taken the name meanwhile."""
        await asyncio.sleep(self._interval_s)
        await self._loop.run()

    async def _renew(self) -> None:
        held = await self._hold()
        if held is not None and not self.lost.is_set():
            logger.error("%s: this one has lost its name", _described(self._service_id, held[0]))
            self.lost.set()

    async def give_back(self) -> None:
        """Where Redis still answers."""
        try:
            await self._redis.eval(_GIVE_BACK, 1, self._key, self._value)
        except REDIS_DOWN as error:
            logger.warning("the name of the service could not be given back, it is free in a while: %s", error)
        await self._redis.aclose()

    async def _asked(self, question: Awaitable[Any]) -> Any:
        try:
            return await question
        except REDIS_DOWN as error:
            raise StartError(f"the Redis at {self._place} {complaint(error)}", field="redis.url") from None

    async def _hold(self) -> tuple[bytes, int] | None:
        asked_s = monotonic_s()
        answer: Any = await self._redis.eval(_HOLD, 1, self._key, self._value, round(self._lease_s * 1000))
        if answer is not None:
            return answer[0], answer[1]
        self._renewed_s = asked_s
        return None


def _has_ended_here(value: bytes) -> bool:
    """The process that wrote this ran on this machine, and does not any more."""
    try:
        holder = json.loads(value)
        if not holder["machine"] or holder["machine"] != machine():
            return False
        pid, began = int(holder["pid"]), int(holder["process_began"])
        if began <= 0:
            return False
        os.kill(pid, 0)
        return began_ticks(pid) not in (0, began)
    except ProcessLookupError:
        return True
    except (ValueError, KeyError, TypeError, OSError):
        return False


def _described(service_id: str, value: bytes) -> str:
    try:
        holder = json.loads(value)
        since = datetime.fromtimestamp(holder["since_ms"] / 1000, UTC).isoformat(" ", "seconds")
        return f"service {service_id} already runs on {holder['host']} (process {holder['pid']}, since {since})"
    except (ValueError, KeyError, TypeError):
        return f"service {service_id} already runs somewhere"
