"""Tenants' rates over all routers: tells Redis what this router's tenants have spent, and hears what there is.

Of each bucket Redis keeps how much it has and when that was, by its own clock; one script fills it, takes what was
spent from it and answers what is left. Several buckets go together. Nothing is asked while no tenant has spent
anything. See `tenant_rates` for what is decided by it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence, Sized

from cluster_core.clock import monotonic_s
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.access.tenant_limits import LimitsOf
from control_plane.intake.tenant_rates import MOST_DEBT_S, Spent, TenantRates

logger = logging.getLogger(__name__)

# The first write changes nothing and needs no memory: Redis whose memory is full lets what follows through.
# KEYS: buckets, and behind each the number of what this router told of it last. ARGV: what one may owe, in seconds of
# its rate; how long a number is kept, in ms; for each bucket its rate per second, its burst, what was spent, and the
# number of that. What comes again, its answer having been lost, is not taken again. Answers what each has now. One that
# is full again by then is not kept; one that says nothing is full, so that this does not end half-way.
SPEND = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local levels = {}
for index = 1, #KEYS / 2 do
  local key, told = KEYS[index * 2 - 1], KEYS[index * 2]
  local rate, burst = tonumber(ARGV[index * 4 - 1]), tonumber(ARGV[index * 4])
  local spent, number = tonumber(ARGV[index * 4 + 1]), ARGV[index * 4 + 2]
  redis.call('PERSIST', key)
  local level, kept = burst, redis.pcall('GET', key)
  local had, at = string.match(type(kept) == 'string' and kept or '', '^(-?%d+%.%d+) (%d+%.%d+)$')
  if had then
    level = math.min(burst, tonumber(had) + math.max(0, now - tonumber(at)) * rate)
  end
  if spent ~= 0 then
    local last = tonumber(redis.pcall('GET', told)) or 0
    if last >= tonumber(number) then spent, number = 0, last end
    redis.call('SET', told, number, 'PX', ARGV[2])
  end
  level = math.min(burst, math.max(level - spent, -tonumber(ARGV[1]) * rate))
  local full_ms = math.ceil((burst - level) / rate * 1000) + 1
  redis.call('SET', key, string.format('%.6f %.6f', level, now), 'PX', string.format('%.0f', full_ms))
  levels[index] = string.format('%.6f', level)
end
return levels
"""
_WORDS = LoopWords(
    logger,
    away="Redis does not answer, this router goes on with its part of tenants' rates: %s",
    back="Redis answers again, tenants' rates are those of all routers",
    defect="tenants' rates cannot be shared with other routers",
)
_EVERY_S = 0.1
# While nobody has spent anything.
_IDLE_S = 1.0
# Routers that are heard of no more count for so long: who hears of its rates again may hear of the others later.
_FEWER_S = 5.0
# For as long a report may come again.
_KEPT_MS = 600_000
# Tenants of whom one call tells, with two buckets each: the loop is others' between two calls.
_MOST_TENANTS = 64
# A report of many tenants is followed by so many times what it took, so that it is no more than a fifth of the time.
_REST = 4.0


class SharedRates:
    """`follow` until cancelled, then `close`. rates: as this router knows them. apart: requests that it decided about
    while Redis did not answer."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        limits_of: LimitsOf,
        others: Sized,
        router_id: str,
        now_s: Callable[[], float] = monotonic_s,
        every_s: float = _EVERY_S,
    ) -> None:
        """others: the routers that there are beside this one. router_id: another one with each start."""
        self._redis = redis
        self._service_id = service_id
        self._others = others
        self._router_id = router_id
        self._now_s = now_s
        self._every_s = every_s
        self._is_new = asyncio.Event()
        # Since when there are fewer routers than count.
        self._fewer_since_s = now_s()
        # The last report, of all tenants.
        self._took_s = 0.0
        self._loop = RedisLoop(self.share, self._pause, _WORDS)
        self.rates = TenantRates(limits_of)
        self.apart = 0

    async def follow(self) -> None:
        await self._loop.run()

    async def close(self) -> None:
        """What was spent last is told, where Redis still answers."""
        with contextlib.suppress(*REDIS_DOWN):
            await self.share()
        await self._redis.aclose()

    def begin(self, tenant: str, *, resumed: bool = False) -> None:
        """Takes one request. Raises OverloadedError. resumed: its answer had begun at another router."""
        if not self.rates.limits_of(tenant).has_rates:
            return
        self.apart += not self._loop.connected
        if self.rates.begin(tenant, self._now_s(), resumed=resumed):
            # What others know of the tenant is asked for at once.
            self._is_new.set()

    def spend(self, tenant: str, tokens: int) -> None:
        self.rates.spend(tenant, tokens, self._now_s())

    @contextlib.contextmanager
    def waiting(self, tenant: str, tokens: int) -> Iterator[None]:
        """The block waits for a slot for so many tokens. They are spent at its end; where it raises, none are."""
        self.rates.waits(tenant, tokens)
        try:
            yield
        finally:
            self.rates.waits(tenant, -tokens)
        self.spend(tenant, tokens)

    async def share(self) -> None:
        """Tells what was spent, and takes over what there is. Raises one of REDIS_DOWN."""
        self._is_new.clear()
        many = len(self._others) + 1
        if many >= self.rates.routers:
            self.rates.routers, self._fewer_since_s = many, self._now_s()
        began_s, tenants = self._now_s(), self.rates.tenants()
        for first in range(0, len(tenants), _MOST_TENANTS):
            told = self.rates.to_tell(tenants[first : first + _MOST_TENANTS], self._now_s())
            if not told:
                await asyncio.sleep(0)
                continue
            try:
                levels = await self._spend(told)
            except BaseException:
                self.rates.not_told(told)
                self._fewer_since_s = self._now_s()
                raise
            if self._now_s() - self._fewer_since_s > _FEWER_S:
                self.rates.routers = many
            self.rates.told(told, map(float, levels), self._now_s())
        self._took_s = self._now_s() - began_s

    async def _pause(self) -> None:
        if len(self.rates):
            await asyncio.sleep(max(self._every_s, min(_REST * self._took_s, _IDLE_S)))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_S):
                await self._is_new.wait()

    async def _spend(self, told: Sequence[Spent]) -> list[bytes]:
        keys = [key for each in told for key in self._keys(each)]
        numbers = [number for each in told for number in (each.rate_per_s, each.burst, each.amount, each.number)]
        levels: list[bytes] = await self._redis.eval(SPEND, len(keys), *keys, MOST_DEBT_S, _KEPT_MS, *numbers)
        return levels

    def _keys(self, spent: Spent) -> tuple[str, str]:
        bucket = registry.rate_key(self._service_id, spent.limit, spent.tenant)
        return bucket, registry.told_rate_key(bucket, self._router_id)
