"""What the answers of workers to probes come to; the workers are a table of answers, time is simulated."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import DeadlineError
from control_plane.fleet.membership import Membership
from control_plane.fleet.vitality import VITALITY_TIMING
from control_plane.fleet.worker_client import WorkerClient, WorkerLeftError, WorkerLostError, WorkerStalledError
from control_plane.fleet.worker_probes import _MOVED_AT_ONCE, WorkerProbes
from control_plane.model.worker_snapshot import WorkerSnapshot
from tests import simulated_time

Answer = Callable[[float], Any]


def status(generation: int = 1, stalled_s: float = 0.0) -> wire.GetWorkerStatusResponse:
    record = wire.WorkerRegistration(worker_id="decode-0", generation=generation)
    return wire.GetWorkerStatusResponse(registration=record, load=wire.WorkerLoad(stalled_s=stalled_s))


class World:
    """One decode worker, and another one to go to. late_s: how much later than asked the router hears of anything."""

    def __init__(self, answer: wire.GetWorkerStatusResponse | None, *, late_s: float = 0.0) -> None:
        self.answer, self._late_s = answer, late_s
        self.membership = Membership()
        names = ("decode-0", "decode-1")
        self.membership.replace([
            wire.WorkerRegistration(
                worker_id=name, generation=1, pool=wire.POOL_DECODE, state=wire.WORKER_STATE_READY, address=name
            )
            for name in names
        ])  # fmt: skip
        self.worker: WorkerSnapshot = self.membership.usable(wire.POOL_DECODE)[0]
        self.asked = 0
        loop = asyncio.get_running_loop()
        self.probes = WorkerProbes(self.membership, cast(WorkerClient, self), asyncio.Condition(), now_s=loop.time)
        self._running = asyncio.create_task(self.probes.run())

    async def status(self, address: str, request: Any, timeout_s: float) -> wire.GetWorkerStatusResponse:
        self.asked += 1
        if self.answer is None:
            await asyncio.sleep(timeout_s + self._late_s)
            raise DeadlineError("Deadline Exceeded")
        return self.answer

    async def wait(self, seconds: float, *, may_leave: bool = True) -> None:
        """A call that waits so long for its first message."""
        async with self.probes.waiting_for(self.worker, lambda why: may_leave):
            await asyncio.sleep(seconds)

    async def end(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    @property
    def is_suspect(self) -> bool:
        return bool(self.membership.suspects())


def played(answer: wire.GetWorkerStatusResponse | None, *, late_s: float = 0.0, may_leave: bool = True) -> World:
    """A call of ten seconds to a worker that answers probes like this."""

    async def play() -> World:
        world = World(answer, late_s=late_s)
        try:
            await world.wait(10.0, may_leave=may_leave)
        finally:
            await world.end()
        return world

    return simulated_time.run(play())


def test_a_slow_worker_that_answers_is_left_alone() -> None:
    world = played(status())
    assert world.asked > 5
    assert not world.is_suspect
    assert world.probes.left_calls == 0


@pytest.mark.parametrize("answer", [status(stalled_s=3.0), status(generation=2), None], ids=["hangs", "other", "none"])
def test_a_call_leaves_a_worker_that_hangs_is_another_one_or_does_not_answer(
    answer: wire.GetWorkerStatusResponse | None,
) -> None:
    with pytest.raises(WorkerStalledError, match="decode-0"):
        played(answer)


def test_a_call_that_has_nowhere_to_go_waits_on() -> None:
    world = played(status(stalled_s=3.0), may_leave=False)
    assert world.is_suspect
    assert world.probes.found_lost == 1


def test_a_router_that_is_starved_itself_suspects_nobody() -> None:
    world = played(None, late_s=2.0)
    assert world.asked > 1
    assert not world.is_suspect
    assert world.probes.found_lost == 0


def test_a_suspect_worker_is_trusted_once_it_answers() -> None:
    async def play() -> bool:
        world = World(status(stalled_s=3.0))
        world.membership.suspect(world.worker)
        await asyncio.sleep(3.0)
        assert world.is_suspect
        world.answer = status()
        await asyncio.sleep(10.0)
        await world.end()
        return world.is_suspect

    assert simulated_time.run(play()) is False


@pytest.mark.parametrize("may_leave", [True, False])
def test_so_many_answers_leave_a_draining_worker_at_each_look_and_only_where_there_is_another(may_leave: bool) -> None:
    async def play() -> list[int]:
        world = World(status())
        left: list[WorkerLostError] = []
        unwatched: list[WorkerLostError] = []
        counts = []
        try:
            with ExitStack() as watches:
                for _ in range(2 * _MOVED_AT_ONCE + 1):
                    watches.enter_context(
                        world.probes.watching(world.worker, lambda why: may_leave, unwatched.append, move=left.append)
                    )
                watches.enter_context(world.probes.watching(world.worker, lambda why: may_leave, unwatched.append))
                world.membership.drains(world.worker)
                for _ in range(5):
                    await asyncio.sleep(VITALITY_TIMING.look_s)
                    counts.append(len(left))
        finally:
            await world.end()
        assert all(isinstance(each, WorkerLeftError) for each in left)
        assert unwatched == []
        return counts

    counts = simulated_time.run(play())
    most = 2 * _MOVED_AT_ONCE + 1 if may_leave else 0
    assert counts[-1] == most, "and a call that is no answer stays"
    assert max(after - before for before, after in itertools.pairwise([0, *counts])) <= _MOVED_AT_ONCE


def test_a_timeout_of_the_call_itself_is_no_verdict_on_the_worker() -> None:
    async def play() -> None:
        world = World(status())
        try:
            async with world.probes.waiting_for(world.worker, lambda why: True):
                raise TimeoutError
        finally:
            await world.end()

    with pytest.raises(TimeoutError):
        simulated_time.run(play())
