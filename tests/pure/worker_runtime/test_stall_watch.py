"""A worker tells that its engine hangs, and ends where it does not come back; in simulated time."""

import asyncio
from dataclasses import replace
from typing import cast

from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineLoad, EngineStatus
from tests import simulated_time
from worker_runtime import stall_watch

GIVE_UP_S = 10.0


class Stalling:
    """An engine of which only this is known."""

    def __init__(self) -> None:
        self.stalled_s = 0.0

    def status(self) -> EngineStatus:
        return EngineStatus(load=replace(EngineLoad(), stalled_s=self.stalled_s))


async def watched(hangs_s: float, then_s: float = 1.0) -> tuple[int, list[str]]:
    """How often the worker told of a change, and why it gave up, of an engine that hangs for so long."""
    engine, changes, given_up = Stalling(), 0, list[str]()

    def change() -> None:
        nonlocal changes
        changes += 1

    watching = asyncio.create_task(
        stall_watch.watch(cast(Engine, engine), on_change=change, give_up=given_up.append, give_up_after_s=GIVE_UP_S)
    )
    await asyncio.sleep(5.0)
    engine.stalled_s = 2.0
    await asyncio.sleep(hangs_s)
    engine.stalled_s = 0.0
    await asyncio.sleep(then_s)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return changes, given_up


def test_one_that_goes_on_is_told_of_twice_and_kept() -> None:
    assert simulated_time.run(watched(GIVE_UP_S - 1.0)) == (2, [])


def test_one_that_does_not_come_back_ends_its_worker_once() -> None:
    changes, given_up = simulated_time.run(watched(GIVE_UP_S + 5.0))
    assert changes == 1
    assert len(given_up) == 1


def test_a_process_that_was_frozen_as_a_whole_is_not_given_up_for_what_its_clock_says() -> None:
    """One look finds minutes gone by; the next one finds it well."""
    assert simulated_time.run(watched(stall_watch.LOOK_S * 1.5))[1] == []
