"""Several routers place as one does: TTFT of the same requests in virtual time, through one router, two and four."""

import asyncio
from functools import partial
from random import Random
from unittest import mock

import pytest

from fault_sim import virtual_time, world
from fault_sim.blocks.fabric import BlockEngineSettings
from fault_sim.clients import Client
from fault_sim.plan import Plan, Request
from fault_sim.world import World
from tests.campaign.fault_sim.planted import routers_do_not_tell_each_other

_REQUESTS = 300
_RATE = 5.0
# Of virtual time: TTFTs are of this precision.
_LOOK_S = 0.01
# A prefill of 100 tokens takes 0.2 s.
_TOKEN_S = 0.002
_SETTINGS = (
    ("placement.disaggregation", "always"),
    ("placement.policy", "least_loaded"),
    ("router.max_in_flight_requests", 4096),
    ("router.queue_timeout_s", 60),
)


def plan(routers: int) -> Plan:
    rng, at_s, requests = Random(1), 0.0, []
    for number in range(_REQUESTS):
        at_s += rng.expovariate(_RATE)
        own = rng.randint(20, 150)
        requests.append(Request(number, round(at_s, 4), rng.randrange(6), rng.choice((0, 16, 32)), own, number, 4))
    return Plan(1, 4, 2, 2048, 2048, 0.0002, _SETTINGS, tuple(requests), (), routers)


def p90_ttft_s(routers: int) -> float:
    """Of requests that take the routers in turn."""
    played, ttfts_s = World(plan(routers)), []

    async def ask(request: Request) -> None:
        await asyncio.sleep(request.at_s)
        loop = asyncio.get_running_loop()
        client, asked_s = Client(request, lambda turn: played.api(request.number + turn), played.note), loop.time()
        asking = asyncio.create_task(client.run())
        while not client.answer.tokens and not asking.done():  # noqa: ASYNC110 - clients of a run tell nobody
            await asyncio.sleep(_LOOK_S)
        ttfts_s.append(loop.time() - asked_s)
        await asking
        assert client.answer.code == "OK", client.answer.details

    async def main() -> None:
        await played.start()
        await asyncio.gather(*map(ask, played.plan.requests))
        await played.stop()

    slow = partial(BlockEngineSettings, token_s=_TOKEN_S)
    # A plan has no field for an engine's speed; these are slow, so that queues decide.
    with mock.patch.object(world, "BlockEngineSettings", slow):
        virtual_time.run(main(), 1)
    return sorted(ttfts_s)[int(0.9 * len(ttfts_s))]


@pytest.fixture(scope="module")
def of_one_router() -> float:
    return p90_ttft_s(1)


@pytest.mark.parametrize("routers", [2, 4])
def test_routers_that_tell_each_other_place_as_one_does(of_one_router: float, routers: int) -> None:
    assert p90_ttft_s(routers) < 1.1 * of_one_router


def test_routers_that_do_not_would_be_seen(of_one_router: float) -> None:
    with routers_do_not_tell_each_other():
        assert p90_ttft_s(4) > 1.2 * of_one_router
