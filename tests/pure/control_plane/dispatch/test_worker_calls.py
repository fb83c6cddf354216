"""Where a call that waits for a decode worker could go instead."""

import asyncio
from typing import Any, cast

import pytest
from rachis.v1 import worker_pb2 as wire

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
