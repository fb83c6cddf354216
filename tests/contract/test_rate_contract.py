"""Buckets of tenants' rates over a real Redis and over the simulation's, asked by the production code."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

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


def router(redis: Connect, routers: int = 1) -> SharedRates:
    return SharedRates(redis(), SERVICE, lambda tenant: LIMITS, range(routers - 1))


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


async def test_a_router_that_ends_tells_what_it_has_not_told(redis: Connect) -> None:
    first = router(redis)
    first.begin("acme")
    first.spend("acme", 25)
    await first.close()
    client = redis()
    (level,) = await client.eval(SPEND, 1, KEY, 3600, LIMITS.tokens_per_s, BURST, 0)
    assert float(level) == pytest.approx(BURST - 25, abs=0.5)
    await client.aclose()


async def test_a_bucket_fills_to_its_burst_owes_an_hour_at_most_and_is_gone_when_it_is_full(redis: Connect) -> None:
    client = redis()

    async def spent(rate: float, burst: float, amount: float) -> float:
        return float((await client.eval(SPEND, 1, KEY, 3600, rate, burst, amount))[0])

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
