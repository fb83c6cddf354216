"""Buckets of tenants' rates over a real Redis and over the simulation's, asked by the production code."""

from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

import pytest
from redis.exceptions import ResponseError

from cluster_core.errors import OverloadedError
from cluster_wire import registry
from cluster_wire.redis_client import connect
from control_plane.access.tenant_limits import TenantLimits
from control_plane.intake.shared_rates import SPEND, SharedRates
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network
from tests.fakes.redis_server import running_redis

SERVICE = "svc-test"
# So slow that a test cannot see a bucket fill.
LIMITS = TenantLimits(tokens_per_s=0.01, burst_s=1000.0)
BURST = 10.0
KEY = registry.rate_key(SERVICE, "tokens_per_s", "acme")

Connect = Callable[[], Any]


@pytest.fixture(params=["local", pytest.param("Redis", marks=pytest.mark.integration)])
async def redis(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    if request.param == "Redis":
        with running_redis(tmp_path) as url:
            yield lambda: connect(url, 60.0)
        return
    store, network = Store(), Network(Random(0))
    yield lambda: LocalRedis(store, network, "test", 60.0)


class Sometimes:
    """Redis that answers, or does not. is_mute: it does what it is asked to, and its answer is lost."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self.is_away = False
        self.is_mute = False

    async def eval(self, *given: Any) -> Any:
        if self.is_away:
            raise ConnectionError("it is away")
        answer = await self._redis.eval(*given)
        if self.is_mute:
            raise ConnectionError("its answer is lost")
        return answer

    async def aclose(self) -> None:
        await self._redis.aclose()


def router(redis: Connect, routers: int = 1) -> SharedRates:
    return SharedRates(redis(), SERVICE, lambda tenant: LIMITS, range(routers - 1), token_hex(4))


async def test_what_one_router_has_spent_another_one_knows(redis: Connect) -> None:
    first, second = router(redis, 2), router(redis, 2)
    first.begin("acme")
    first.spend("acme", 25)
    await first.share()
    second.begin("zeta")
    second.begin("acme")
    await second.share()
    second.begin("zeta")
    with pytest.raises(OverloadedError, match="has had its tokens"):
        second.begin("acme")
    await first.close()
    await second.close()


async def test_what_gets_no_slot_leaves_a_bucket_that_owes_all_it_may_as_it_was(redis: Connect) -> None:
    shared = router(redis)
    shared.begin("acme")
    shared.spend("acme", 10**9)
    await shared.share()
    with pytest.raises(ZeroDivisionError), shared.waiting("acme", 10**6):
        await shared.share()
        raise ZeroDivisionError
    await shared.share()
    client = redis()
    (level,) = await client.eval(SPEND, 2, KEY, f"{KEY}:a", 3600, 60_000, LIMITS.tokens_per_s, BURST, 0, 1)
    assert float(level) == pytest.approx(-3600 * 0.01, abs=0.5)
    await client.aclose()
    await shared.close()


async def test_what_has_a_slot_is_spent_once(redis: Connect) -> None:
    shared = router(redis)
    shared.begin("acme")
    with shared.waiting("acme", 25):
        await shared.share()
        with pytest.raises(OverloadedError, match="has had its tokens"):
            shared.begin("acme")
    await shared.close()
    client = redis()
    (level,) = await client.eval(SPEND, 2, KEY, f"{KEY}:a", 3600, 60_000, LIMITS.tokens_per_s, BURST, 0, 1)
    assert float(level) == pytest.approx(BURST - 25, abs=0.5)
    await client.aclose()


async def test_a_router_that_ends_tells_what_it_has_not_told(redis: Connect) -> None:
    first = router(redis)
    first.begin("acme")
    first.spend("acme", 25)
    await first.close()
    client = redis()
    (level,) = await client.eval(SPEND, 2, KEY, f"{KEY}:a", 3600, 60_000, LIMITS.tokens_per_s, BURST, 0, 1)
    assert float(level) == pytest.approx(BURST - 25, abs=0.5)
    await client.aclose()


async def test_a_bucket_fills_to_its_burst_owes_an_hour_at_most_and_is_gone_when_it_is_full(redis: Connect) -> None:
    client = redis()

    numbers = count(1)

    async def spent(rate: float, burst: float, amount: float) -> float:
        numbered = (rate, burst, amount, next(numbers))
        return float((await client.eval(SPEND, 2, KEY, f"{KEY}:a", 3600, 60_000, *numbered))[0])

    assert await spent(0.01, 10, 4) == pytest.approx(6, abs=0.5)
    assert await spent(0.01, 10, 10**9) == pytest.approx(-36, abs=0.5)
    # A million times as fast, and smaller: full at once, and not kept.
    assert await spent(1e6, 5, 0) <= 5
    assert await spent(1e6, 5, 1) <= 4
    assert await spent(1e9, 5, 0) == 5
    await client.aclose()


async def test_many_buckets_go_in_few_calls(redis: Connect) -> None:
    first, second = router(redis), router(redis)
    for number in range(300):
        first.begin(f"t{number}")
        first.spend(f"t{number}", 11 + number)
    await first.share()
    for number in range(300):
        second.begin(f"t{number}")
    await second.share()
    for number in (0, 7, 255, 256, 299):
        with pytest.raises(OverloadedError) as raised:
            second.begin(f"t{number}")
        assert raised.value.retry_after_ms == pytest.approx(min(3600.0, (1 + number) / 0.01) * 1000, rel=0.1)
    await first.close()
    await second.close()


async def test_a_bucket_that_says_nothing_is_full_and_spoils_no_other(redis: Connect) -> None:
    first, client = router(redis), redis()
    for tenant in ("zeta", "acme", "beta"):
        first.begin(tenant)
        first.spend(tenant, 25)
    await first.share()
    for nothing in ("", "5", "many 0", "nan nan", "1.0 2.0 3.0"):
        await client.set(KEY, nothing)
        for tenant in ("zeta", "acme", "beta"):
            first.spend(tenant, 1)
        await first.share()
        assert (await client.get(KEY)).decode().startswith(f"{BURST - 1:.6f} ")
    zeta = await client.get(registry.rate_key(SERVICE, "tokens_per_s", "zeta"))
    assert float(zeta.split()[0]) == pytest.approx(BURST - 25 - 5, abs=0.5)
    await first.close()
    await client.aclose()


async def test_routers_that_are_not_heard_of_count_for_a_while_and_those_that_come_at_once(redis: Connect) -> None:
    """Of a Redis that is back this router may hear of its rates before it hears of the other routers."""
    others, now_s, sometimes = ["b", "c"], 0.0, Sometimes(redis())
    # As much of Redis as is asked for.
    shared = SharedRates(sometimes, SERVICE, lambda tenant: LIMITS, others, "a", lambda: now_s)  # type: ignore[arg-type]
    await shared.share()
    assert shared.rates.routers == 3, "before any tenant has come"
    sometimes.is_away = True
    others.clear()
    shared.begin("acme")
    shared.spend("acme", 1)
    for later_s in (10.0, 60.0):
        now_s = later_s
        with pytest.raises(ConnectionError):
            await shared.share()
        assert shared.rates.routers == 3
    sometimes.is_away = False
    await shared.share()
    assert shared.rates.routers == 3
    others.append("b")
    now_s = 62.0
    await shared.share()
    assert shared.rates.routers == 3
    now_s = 66.0
    await shared.share()
    assert shared.rates.routers == 2, "the third one has gone"
    await shared.close()


async def test_what_is_told_again_because_the_answer_was_lost_is_taken_once(redis: Connect) -> None:
    """A Redis that hung does all of what it was sent meanwhile."""
    sometimes, client = Sometimes(redis()), redis()
    # As above.
    shared = SharedRates(sometimes, SERVICE, lambda tenant: LIMITS, [], "a", lambda: 0.0)  # type: ignore[arg-type]
    shared.begin("acme")
    await shared.share()
    sometimes.is_mute = True
    for _ in range(5):
        shared.spend("acme", 3)
        with pytest.raises(ConnectionError):
            await shared.share()
    shared.spend("acme", 2)
    sometimes.is_mute = False
    await shared.share()
    await shared.share()
    assert float((await client.get(KEY)).split()[0]) == pytest.approx(BURST - 5 * 3 - 2, abs=0.5)
    with pytest.raises(OverloadedError) as raised:
        shared.begin("acme")
    assert raised.value.retry_after_ms == pytest.approx(7 / 0.01 * 1000, rel=0.1)
    await shared.close()
    await client.aclose()


async def test_a_report_that_comes_behind_a_later_one_is_not_taken(redis: Connect) -> None:
    client = redis()
    for number, amount, left in ((1, 3, 7), (2, 1, 6), (1, 3, 6), (2, 1, 6), (3, 1, 5)):
        numbered = (0.01, BURST, amount, number)
        (level,) = await client.eval(SPEND, 2, KEY, f"{KEY}:a", 3600, 60_000, *numbered)
        assert float(level) == pytest.approx(left, abs=0.5)
    (level,) = await client.eval(SPEND, 2, KEY, f"{KEY}:b", 3600, 60_000, 0.01, BURST, 1, 1)
    assert float(level) == pytest.approx(4, abs=0.5), "another router's numbers are its own"
    await client.aclose()


@pytest.mark.integration
async def test_a_full_redis_takes_what_is_spent(tmp_path: Path) -> None:
    with running_redis(tmp_path) as url:
        client, shared = connect(url, 60.0), router(lambda: connect(url, 60.0))
        await client.config_set("maxmemory", 1)
        with pytest.raises(ResponseError, match="memory"):
            await client.set("anything", 1)
        shared.begin("acme")
        shared.spend("acme", 25)
        await shared.share()
        await shared.share()
        with pytest.raises(OverloadedError):
            shared.begin("acme")
        await shared.close()
        await client.aclose()
