"""Bugs that are planted on purpose, to show that the runs with faults would see them.

Each is a context in which one thing of the production code, or of the engine it relies on, is done wrong.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

from cluster_core.errors import RachisError
from control_plane.dispatch import journey
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.journey import Journey
from control_plane.dispatch.journey_steps import Emit, Prefilled
from control_plane.fleet.worker_client import WorkerClient
from control_plane.placement.flight import Flight
from fault_sim.blocks import pulls
from fault_sim.blocks.leases import Leases


def _release_does_not_wait_for_pulls() -> AbstractContextManager[Any]:
    async def release(self: Any, lease: Any) -> None:
        lease.safe_at_s = 0.0
        await original(self, lease)

    original = Dispatcher._release
    return mock.patch.object(Dispatcher, "_release", release)


def _leased_blocks_are_freed_early() -> AbstractContextManager[Any]:
    grant = Leases.grant

    def grant_and_free(self: Any, run: Any) -> Any:
        lease = grant(self, run)
        blocks = self._held[lease.lease_id].blocks
        self._pool.drop(blocks)
        blocks.clear()
        return lease

    return mock.patch.object(Leases, "grant", grant_and_free)


def _late_pulls_are_used() -> AbstractContextManager[Any]:
    return mock.patch.object(pulls, "is_late", lambda deadline, now: False)


def _a_lease_is_lost() -> AbstractContextManager[Any]:
    async def release(self: Any, lease: Any) -> None:
        pass

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Dispatcher, "_release", release))
    stack.enter_context(mock.patch.object(Leases, "_expire", lambda self, lease_id: None))
    return stack


def _the_first_token_comes_twice() -> AbstractContextManager[Any]:
    original = Journey._prefilled

    def prefilled_twice(self: Any, event: Any, now_s: float) -> Any:
        instructions = original(self, event, now_s)
        again = tuple(each for each in instructions if isinstance(each, Emit))
        return (*again, *instructions)

    return mock.patch.dict(journey._HANDLERS, {(journey.Stage.PREFILL, Prefilled): prefilled_twice})


def _failed_attempts_stay_in_flight() -> AbstractContextManager[Any]:
    original = Flight.end

    def end(self: Any) -> None:
        if sys.exc_info()[0] is None:
            original(self)

    return mock.patch.object(Flight, "end", end)


def _cancelling_is_not_passed_on() -> AbstractContextManager[Any]:
    original = WorkerClient.decode

    async def decode(self: Any, worker: Any, request: Any, timeout_s: float) -> AsyncIterator[Any]:
        """The call is read by a task of its own, which nobody cancels."""
        read: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for response in original(self, worker, request, timeout_s):
                    read.put_nowait(response)
                read.put_nowait(None)
            except RachisError as error:
                read.put_nowait(error)

        pumping.append(asyncio.create_task(pump()))
        while (response := await read.get()) is not None:
            if isinstance(response, RachisError):
                raise response
            yield response

    pumping: list[asyncio.Task[None]] = []
    return mock.patch.object(WorkerClient, "decode", decode)


PLANTED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "release does not wait for pulls": _release_does_not_wait_for_pulls,
    "leased blocks are freed early": _leased_blocks_are_freed_early,
    "late pulls are used": _late_pulls_are_used,
    "a lease is lost": _a_lease_is_lost,
    "the first token comes twice": _the_first_token_comes_twice,
    "failed attempts stay in flight": _failed_attempts_stay_in_flight,
    "cancelling is not passed on": _cancelling_is_not_passed_on,
}
