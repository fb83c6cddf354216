"""Where a call that waits for a decode worker could go instead, and what placement is told of a second try."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rachis.v1 import worker_pb2 as wire

from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.worker_calls import WorkerCalls
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import WorkerLeftError, WorkerLostError, WorkerStalledError
from tests.pure.control_plane.dispatch.played_journey import new_job

NOBODY: Any = cast(Any, None)


def calls(*workers: str) -> WorkerCalls:
    membership = Membership()
    membership.replace([
        wire.WorkerRegistration(
            worker_id=name, generation=1, pool=wire.POOL_DECODE, state=wire.WORKER_STATE_READY, address=name
        )
        for name in workers
    ])  # fmt: skip
    return WorkerCalls(new_job(), NOBODY, NOBODY, NOBODY, membership, asyncio.Condition(), NOBODY, lambda: 0.0)


@pytest.mark.parametrize(
    ("workers", "hung", "may_leave"),
    [
        (("decode-0",), (), True),
        ((), (), False),
        (("decode-0",), ("decode-0",), False),
        (("decode-0", "decode-1"), ("decode-0",), True),
    ],
)
def test_a_worker_that_hangs_is_left_for_one_that_did_not_and_a_draining_one_for_any(
    workers: tuple[str, ...], hung: tuple[str, ...], may_leave: bool
) -> None:
    stalled, left = WorkerStalledError("it hangs"), WorkerLeftError("it drains")
    without = frozenset((name, 1) for name in hung)

    assert calls(*workers).may_leave_decode(stalled, without) is may_leave
    assert calls(*workers).may_leave_decode(left, without) is bool(workers)
    assert calls(*workers).may_leave_decode(WorkerLostError("x"), frozenset()) is bool(workers)


class Doubting:
    """Placement and probes: who was asked for, and one worker that may hang."""

    def __init__(self) -> None:
        self.asked: list[tuple[steps.Excluded, steps.Excluded]] = []

    def doubtful(self) -> steps.Excluded:
        return frozenset({("decode-9", 1)})

    def place(self, *_: Any, excluded: steps.Excluded, avoided: steps.Excluded) -> None:
        self.asked.append((excluded, avoided))


@pytest.mark.parametrize(("excluded", "avoided"), [((), ()), ((), ("decode-0",)), (("decode-0",), ("decode-1",))])
async def test_a_second_try_goes_rather_to_who_has_not_failed_it_and_to_nobody_that_may_hang(
    excluded: tuple[str, ...], avoided: tuple[str, ...]
) -> None:
    world, job = Doubting(), new_job()
    placer = SimpleNamespace(
        place=lambda job, pool, excluded, *, avoided, prefills: world.place(excluded=excluded, avoided=avoided)
    )
    told = cast(Any, placer), Membership(), asyncio.Condition(), cast(Any, world), lambda: 0.0
    without, rather = (frozenset((name, 1) for name in names) for names in (excluded, avoided))
    # No time to wait for another worker.
    call = steps.PlaceDecode(without, prefills=False, wait_s=0.0, deadline_s=1.0, avoided=rather)

    events = [each async for each in WorkerCalls(job, NOBODY, NOBODY, *told).carry_out(call)]

    assert events == [steps.Placed(None)]
    assert world.asked == [(without, rather | (world.doubtful() if without or rather else frozenset()))]
