"""Asking a draining worker for an answer's KV: what is left, what is released, and whose slowness is whose."""

import asyncio
from typing import Any, cast

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.handing_over import HAND_OVER_S, HandOver
from control_plane.fleet.worker_client import DecodeCall, WorkerClient, WorkerLeftError
from tests import simulated_time
from tests.pure.control_plane.dispatch.played_journey import D0

CALL = steps.CallDecode(D0, "r.2", pulls=True, may_move=True, hung=frozenset(), until_s=60.0)
DELTA = wire.DecodeResponse(delta=generation.CompletionDelta(token_ids=[1]))
LAST = wire.DecodeResponse(handed_over=wire.KvHandoff(lease_id="r.2"))


class World:
    """A worker that answers as it is told, and what is asked of the router's side."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.left: list[object] = []
        self.released: list[str] = []
        self.hand_over = HandOver(cast(WorkerClient, _Client(self)), CALL, cast(DecodeCall, _Decode(self)))

    async def asked(self) -> bool:
        if isinstance(self._answer, Exception):
            raise self._answer
        return bool(self._answer)


class _Client:
    def __init__(self, world: World) -> None:
        self._world = world

    async def hand_over(self, *_: Any) -> bool:
        return await self._world.asked()

    def release_soon(self, worker: object, lease_id: str, timeout_s: float) -> None:
        assert worker == D0
        self._world.released.append(lease_id)


class _Decode:
    def __init__(self, world: World) -> None:
        self.leave = world.left.append


WHY = WorkerLeftError("it drains")


def test_nothing_is_released_or_left_of_a_call_whose_worker_was_not_asked() -> None:
    async def play() -> World:
        world = World(True)
        world.hand_over.read(DELTA)
        await world.hand_over.end()
        return world

    world = simulated_time.run(play())
    assert (world.left, world.released) == ([], [])


def test_the_lease_is_the_readers_once_its_message_is_read() -> None:
    async def play() -> World:
        world = World(True)
        world.hand_over.begin(WHY)
        await asyncio.sleep(0.5)
        world.hand_over.read(LAST)
        await world.hand_over.end()
        return world

    assert simulated_time.run(play()).released == []


@pytest.mark.parametrize("answer", [False, UnavailableError("gone"), ValueError("a defect")])
def test_an_answer_that_is_not_handed_over_is_left_at_once(answer: object) -> None:
    async def play() -> World:
        world = World(answer)
        world.hand_over.begin(WHY)
        await asyncio.sleep(0.01)
        assert world.left == [WHY]
        await world.hand_over.end()
        return world

    assert simulated_time.run(play()).released == ["r.2"], "whatever the worker made of it"


def test_a_last_message_that_does_not_come_is_waited_for_with_a_bound_and_its_lease_released() -> None:
    async def play() -> World:
        world = World(True)
        world.hand_over.begin(WHY)
        await asyncio.sleep(HAND_OVER_S - 0.2)
        assert world.left == []
        await asyncio.sleep(0.4)
        assert world.left == [WHY]
        await world.hand_over.end()
        return world

    assert simulated_time.run(play()).released == ["r.2"]


def test_a_client_that_takes_nothing_does_not_count_against_the_worker() -> None:
    async def play() -> World:
        world = World(True)
        world.hand_over.read(DELTA)
        world.hand_over.begin(WHY)
        await asyncio.sleep(10 * HAND_OVER_S)
        assert world.left == []
        world.hand_over.reads()
        world.hand_over.read(LAST)
        await world.hand_over.end()
        return world

    assert simulated_time.run(play()).released == []
