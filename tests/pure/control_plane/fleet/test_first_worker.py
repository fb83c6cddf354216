"""Requests that come before any worker is known wait for the first one, so many of them and so long."""

import asyncio

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from control_plane.fleet.first_worker import FirstWorker
from control_plane.fleet.membership import Membership
from tests import simulated_time

RECORD = wire.WorkerRegistration(
    worker_id="decode-0", generation=1, pool=wire.POOL_DECODE, model=wire.ModelInfo(name="m")
)


class World:
    def __init__(self, most_waiting: int = 1) -> None:
        self.membership = Membership()
        self.changed = asyncio.Condition()
        self.first = FirstWorker(self.membership, self.changed, 30.0, most_waiting)

    async def registry_says(self, *records: wire.WorkerRegistration) -> None:
        self.membership.replace(records)
        async with self.changed:
            self.changed.notify_all()


def test_a_model_that_is_known_is_told_at_once() -> None:
    async def ask() -> None:
        world = World(most_waiting=0)
        world.membership.replace([RECORD])
        assert (await world.first.model()).name == "m"

    simulated_time.run(ask())


def test_who_waits_is_told_when_the_first_worker_registers_and_no_sooner() -> None:
    async def ask() -> None:
        world = World()
        waiting = asyncio.create_task(world.first.model())
        await asyncio.sleep(1.0)
        await world.registry_says()
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await world.registry_says(RECORD)
        assert (await waiting).name == "m"

    simulated_time.run(ask())


def test_more_than_may_wait_are_refused_at_once_and_the_others_in_time() -> None:
    async def ask() -> None:
        world = World()
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(world.first.model())
        await asyncio.sleep(0.5)
        with pytest.raises(UnavailableError, match="no worker has registered yet"):
            await world.first.model()
        assert loop.time() == pytest.approx(0.5)
        with pytest.raises(UnavailableError):
            await waiting
        assert loop.time() == pytest.approx(30.0)
        # Its place is free again.
        later = asyncio.create_task(world.first.model())
        await asyncio.sleep(0.0)
        await world.registry_says(RECORD)
        assert (await later).name == "m"

    simulated_time.run(ask())


def test_one_that_leaves_gives_its_place_back() -> None:
    async def ask() -> None:
        world = World()
        leaving = asyncio.create_task(world.first.model())
        await asyncio.sleep(0.5)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        waiting = asyncio.create_task(world.first.model())
        await asyncio.sleep(0.5)
        await world.registry_says(RECORD)
        assert (await waiting).name == "m"

    simulated_time.run(ask())


def test_a_router_that_stops_waits_for_nobody() -> None:
    async def ask() -> None:
        world = World()
        waiting = asyncio.create_task(world.first.model())
        await asyncio.sleep(0.5)
        await world.first.close()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await world.first.model()
        assert asyncio.get_running_loop().time() == pytest.approx(0.5)

    simulated_time.run(ask())
