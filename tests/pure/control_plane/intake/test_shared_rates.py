"""What a router tells of thousands of tenants: a few at a time, so that requests have their turn in between."""

import asyncio
from typing import Any

from control_plane.access.tenant_limits import TenantLimits
from control_plane.intake.shared_rates import SharedRates
from tests import simulated_time

LIMITS = TenantLimits(requests_per_s=10.0, tokens_per_s=1000.0)
MANY = 1_000


class CountingRedis:
    """Answers at the next turn of the loop that nothing is left. told: buckets of each call."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.fails_at: int | None = None

    async def eval(self, script: str, keys: int, *given: Any) -> list[bytes]:
        await asyncio.sleep(0)
        if len(self.told) == self.fails_at:
            raise ConnectionError("it is away")
        self.told.append(keys // 2)
        return [b"0.0"] * (keys // 2)


def shared_by(redis: CountingRedis) -> SharedRates:
    # As much of Redis as is asked for.
    shared = SharedRates(redis, "svc", lambda tenant: LIMITS, [], "a", lambda: 0.0)  # type: ignore[arg-type]
    for number in range(MANY):
        shared.begin(f"t{number}")
        shared.spend(f"t{number}", 3)
    return shared


async def test_a_report_of_many_tenants_leaves_the_loop_to_others_after_a_few_of_them() -> None:
    redis = CountingRedis()
    await shared_by(redis).share()
    assert sum(redis.told) == 2 * MANY and max(redis.told) <= 128


async def test_what_a_report_did_not_get_to_is_told_by_the_next_one() -> None:
    redis = CountingRedis()
    shared = shared_by(redis)
    redis.fails_at = 3
    try:
        await shared.share()
    except ConnectionError:
        redis.fails_at = None
    shared.rates.check_invariants()
    before = sum(redis.told)
    await shared.share()
    assert 0 < before < 2 * MANY and sum(redis.told) == before + 2 * MANY, "an empty bucket is asked about again"


async def test_tenants_of_whom_there_is_nothing_to_tell_do_not_hold_the_loop_either() -> None:
    redis = CountingRedis()
    shared = shared_by(redis)
    await shared.share()
    turns, limits = 0, TenantLimits()
    shared.rates.limits_of = lambda tenant: limits

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await shared.share()
    beside.cancel()
    assert turns >= MANY // 64 and not len(shared.rates)


def test_reports_that_take_long_leave_most_of_the_time_to_others() -> None:
    """Half a second for each: there is one in a second and a half, and not in each tenth of one besides."""

    async def told() -> int:
        loop = asyncio.get_running_loop()

        class Slow(CountingRedis):
            async def eval(self, script: str, keys: int, *given: Any) -> list[bytes]:
                await asyncio.sleep(0.5)
                return await super().eval(script, keys, *given)

        redis = Slow()
        # As above.
        shared = SharedRates(redis, "svc", lambda tenant: LIMITS, [], "a", loop.time)  # type: ignore[arg-type]
        shared.begin("acme")
        following = asyncio.create_task(shared.follow())
        await asyncio.sleep(15.1)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return len(redis.told)

    assert simulated_time.run(told()) == 10
