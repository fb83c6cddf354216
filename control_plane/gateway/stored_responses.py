"""Responses in Redis, for whichever gateway process is asked to go on from one: bounded in size, number and time.

rachis:{<service>}:response:<id>     a `stored_record`; expires
rachis:{<service>}:response-order    sorted set: ids by the time they were stored, in ms of Redis's clock
rachis:{<service>}:response-sizes    hash: bytes of each, and their sum under the empty name

One script makes room, the oldest going first, and stores, so that the three agree whoever else stores. Redis that does
not answer costs nobody an answer: what cannot be stored is counted, and what is asked for is refused for a while. Nor
does one that is full: responses are the first that go.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster_configs.schema import StoredResponsesSection
from cluster_core.clock import monotonic_s
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from control_plane.gateway.callers import tenant
from control_plane.gateway.stored_record import Record, is_response_id, read, written

logger = logging.getLogger(__name__)

# How long Redis may take to answer.
TIMEOUT_S = 1.0
_MIB = 1 << 20

_DROP = """
local function drop(id)
  redis.call('DEL', ARGV[1] .. id)
  redis.call('ZREM', KEYS[1], id)
  local size = redis.call('HGET', KEYS[2], id)
  if size then
    redis.call('HDEL', KEYS[2], id)
    redis.call('HINCRBY', KEYS[2], '', -size)
  end
  return tonumber(size) or 0
end
"""
# Room is made first. Redis may have less memory than responses are allowed: where it evicts nothing by itself, they
# fill nine tenths of it and leave the rest to the registry. Where it does not say how full it is, it refuses the SET.
_STORE = (
    _DROP
    + """
local key, id, size, lifetime_ms = ARGV[1] .. ARGV[2], ARGV[2], #ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function lacking()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' or not string.find(info, 'maxmemory_policy:noeviction', 1, true) then return 0 end
  local used, most = string.match(info, 'used_memory:(%d+)'), string.match(info, 'maxmemory:(%d+)')
  if not used or tonumber(most or 0) == 0 then return 0 end
  return used + 1.25 * size + 1024 - 0.9 * most
end
local function make_room(lacks)
  while true do
    local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
    if not oldest[1] then return lacks <= 0 end
    local is_over = redis.call('ZCARD', KEYS[1]) + 1 > tonumber(ARGV[5])
      or tonumber(redis.call('HGET', KEYS[2], '') or 0) + size > tonumber(ARGV[6])
      or tonumber(oldest[2]) + lifetime_ms <= now_ms
    if not is_over and lacks <= 0 then return true end
    lacks = lacks - drop(oldest[1])
  end
end
if redis.call('EXISTS', key) == 1 or not make_room(lacking()) then return 0 end
if redis.pcall('SET', key, ARGV[3], 'PX', lifetime_ms).err then
  if not make_room(1.25 * size) then return 0 end
  redis.call('SET', key, ARGV[3], 'PX', lifetime_ms)
end
redis.call('ZADD', KEYS[1], now_ms, id)
redis.call('HSET', KEYS[2], id, size)
redis.call('HINCRBY', KEYS[2], '', size)
redis.call('PEXPIRE', KEYS[1], lifetime_ms)
redis.call('PEXPIRE', KEYS[2], lifetime_ms)
return 1
"""
)
_DELETE = (
    _DROP
    + """
local is_there = redis.call('EXISTS', ARGV[1] .. ARGV[2])
drop(ARGV[2])
return is_there
"""
)


class StoreAwayError(Exception):
    """Redis does not answer."""


@dataclass(slots=True)
class StoreCounts:
    """Of one process, by what became of responses that were to be stored."""

    stored: int = 0
    too_large: int = 0
    not_stored: int = 0


class StoredResponses:
    """Of one service. timeout_s: how long Redis may take to answer. pause_s: for which it is not asked again."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        section: StoredResponsesSection,
        *,
        timeout_s: float = TIMEOUT_S,
        pause_s: float = 1.0,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._redis: Any = redis
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._now_s = now_s
        self._section = section
        self._prefix = f"rachis:{{{service_id}}}:response:"
        self._keys = (f"rachis:{{{service_id}}}:response-order", f"rachis:{{{service_id}}}:response-sizes")
        # From when on Redis is asked again; 0 where it has answered.
        self._ask_again_s = 0.0
        self.counts = StoreCounts()

    async def store(self, record: Record) -> None:
        """As the caller's, as far as Redis answers and there is room: the answer does not depend on it."""
        value = written(replace(record, tenant=tenant()))
        if len(value) > self._section.max_response_mib * _MIB:
            self.counts.too_large += 1
            return
        section = self._section
        limits = (round(section.lifetime_s * 1000), section.max_responses, int(section.max_total_mib * _MIB))
        try:
            is_new = await self._asked(
                self._redis.eval(_STORE, 2, *self._keys, self._prefix, record.response_id, value, *limits)
            )
        except StoreAwayError:
            self.counts.not_stored += 1
            return
        if is_new:
            self.counts.stored += 1
        else:
            self.counts.not_stored += 1

    async def find(self, response_id: str) -> Record | None:
        """Raises StoreAwayError."""
        if not is_response_id(response_id):
            return None
        value = await self._asked(self._redis.get(f"{self._prefix}{response_id}"))
        found = None if value is None else read(response_id, value)
        # What is another tenant's is not there.
        return found if found is not None and found.tenant == tenant() else None

    async def delete(self, response_id: str) -> bool:
        """Whether there was one. Raises StoreAwayError."""
        if await self.find(response_id) is None:
            return False
        return bool(await self._asked(self._redis.eval(_DELETE, 2, *self._keys, self._prefix, response_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _asked(self, call: Awaitable[Any]) -> Any:
        """Raises StoreAwayError: once Redis does not answer, nobody waits for it again for a while."""
        asking = asyncio.ensure_future(call)
        try:
            if self._now_s() < self._ask_again_s:
                raise StoreAwayError
            # The client tries again by itself, for longer than anybody would wait.
            await asyncio.wait({asking}, timeout=self._timeout_s)
            if not asking.done():
                raise TimeoutError("no answer in time")
            answer = asking.result()
        except REDIS_DOWN as error:
            if not self._ask_again_s:
                logger.warning("responses are answered and not stored: Redis does not answer (%s)", error)
            self._ask_again_s = self._now_s() + self._pause_s
            raise StoreAwayError from error
        finally:
            asking.cancel()
        if self._ask_again_s:
            logger.warning("responses are stored again")
        self._ask_again_s = 0.0
        return answer
