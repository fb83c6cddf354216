"""Bugs that are planted on purpose, to show that the runs with faults would see them.

Each is a context in which one thing of the production code, or of the engine it relies on, is done wrong.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

from rachis.lost_routers import Received

from cluster_core.clock import ClusterClock
from cluster_core.errors import RachisError
from cluster_wire import calls
from control_plane.dispatch import journey, worker_calls
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.journey import Journey
from control_plane.dispatch.journey_steps import Emit, Prefilled, Stage
from control_plane.dispatch.poison import PoisonMemory
from control_plane.fleet.load_sharing import LoadSharing
from control_plane.fleet.worker_client import DecodeCall, WorkerLostError
from control_plane.fleet.worker_probes import WorkerProbes
from control_plane.model.job import Job
from control_plane.placement.flight import Flight
from fault_sim.blocks import pulls
from fault_sim.blocks.engine import BlockEngine
from fault_sim.blocks.leases import Leases
from fault_sim.clients import Client
from kv_transfer.handoff.overdue_pulls import Quarantine


def _release_does_not_wait_for_pulls() -> AbstractContextManager[Any]:
    async def release(self: Any, lease: Any) -> None:
        lease.safe_at_s = 0.0
        await original(self, lease)

    original = Dispatcher._release
    return mock.patch.object(Dispatcher, "_release", release)


def _leased_blocks_are_freed_early() -> AbstractContextManager[Any]:
    return _freed_early(lambda run: True)


def _blocks_handed_over_are_freed_early() -> AbstractContextManager[Any]:
    return _freed_early(lambda run: not run.job.hand_off)


def _freed_early(which: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    grant = Leases.grant

    def grant_and_free(self: Any, run: Any) -> Any:
        lease = grant(self, run)
        if which(run):
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

    return mock.patch.dict(journey._HANDLERS, {(Stage.PREFILL, Prefilled): prefilled_twice})


def _failed_attempts_stay_in_flight() -> AbstractContextManager[Any]:
    original = Flight.end

    def end(self: Any) -> None:
        if sys.exc_info()[0] is None:
            original(self)

    return mock.patch.object(Flight, "end", end)


def _cancelling_is_not_passed_on() -> AbstractContextManager[Any]:
    original = DecodeCall.messages

    async def messages(self: Any) -> AsyncIterator[Any]:
        """The call is read by a task of its own, which nobody cancels."""
        read: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for response in original(self):
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
    return mock.patch.object(DecodeCall, "messages", messages)


def _pulls_given_up_are_forgotten() -> AbstractContextManager[Any]:
    return mock.patch.object(Quarantine, "take_in", lambda self, report, blocks_of: None)


def _poison_is_forgotten() -> AbstractContextManager[Any]:
    return mock.patch.object(PoisonMemory, "blame", lambda self, job, worker, now_s: None)


def _poisoned_requests_are_tried_on() -> AbstractContextManager[Any]:
    return mock.patch.object(Journey, "_is_poison", property(lambda self: False))


def _clients_are_waited_for_without_a_bound() -> AbstractContextManager[Any]:
    write = calls.write

    async def unbounded(context: Any, message: Any, timeout_s: float | None = None) -> None:
        await write(context, message)

    return mock.patch.object(calls, "write", unbounded)


def _calls_stay_with_a_worker_that_hangs() -> AbstractContextManager[Any]:
    return mock.patch.object(WorkerProbes, "_taken", lambda self, key, whom, at_most=None: [])


def _a_generator_is_not_advanced() -> AbstractContextManager[Any]:
    admit = BlockEngine._admit

    def admit_anew(self: Any, job: Any, **options: Any) -> Any:
        run = admit(self, job, **options)
        run.draws = 0
        return run

    return mock.patch.object(BlockEngine, "_admit", admit_anew)


def _a_resumed_answer_begins_anew() -> AbstractContextManager[Any]:
    return mock.patch.object(Job, "resume", lambda self, received: None)


def _the_last_token_received_is_not_told() -> AbstractContextManager[Any]:
    to_wire = Received.to_wire

    def shortened(self: Any) -> Any:
        told = to_wire(self)
        del told.token_ids[-1:]
        return told

    return mock.patch.object(Received, "to_wire", shortened)


def _text_comes_twice() -> AbstractContextManager[Any]:
    to_wire = Received.to_wire

    def without_text(self: Any) -> Any:
        told = to_wire(self)
        told.text_characters = 0
        return told

    return mock.patch.object(Received, "to_wire", without_text)


def _a_resumed_session_has_an_old_revision() -> AbstractContextManager[Any]:
    told = Client._told

    def without_the_last_input(self: Any) -> Any:
        messages = told(self)
        inputs = [message for message in messages if message.WhichOneof("event") in ("update", "append")]
        return [message for message in messages if not inputs or message is not inputs[-1]]

    return mock.patch.object(Client, "_told", without_the_last_input)


def second_tries_go_anywhere() -> AbstractContextManager[Any]:
    """Also to workers that seem to hang."""
    return mock.patch.object(WorkerProbes, "doubtful", lambda _probes: frozenset())


def hanging_counts_as_an_attempt() -> AbstractContextManager[Any]:
    no_error = type("NoError", (WorkerLostError,), {})
    return mock.patch.object(worker_calls, "WorkerStalledError", no_error)


def clocks_are_not_compared() -> AbstractContextManager[Any]:
    return mock.patch.object(ClusterClock, "measured", lambda *_: 0.0)


def routers_do_not_tell_each_other() -> AbstractContextManager[Any]:
    return mock.patch.object(LoadSharing, "follow", lambda self: asyncio.Event().wait())


# What a seed finds; those above take plays of their own.
PLANTED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "release does not wait for pulls": _release_does_not_wait_for_pulls,
    "leased blocks are freed early": _leased_blocks_are_freed_early,
    "blocks handed over are freed early": _blocks_handed_over_are_freed_early,
    "late pulls are used": _late_pulls_are_used,
    "a lease is lost": _a_lease_is_lost,
    "the first token comes twice": _the_first_token_comes_twice,
    "failed attempts stay in flight": _failed_attempts_stay_in_flight,
    "cancelling is not passed on": _cancelling_is_not_passed_on,
    "pulls given up are forgotten": _pulls_given_up_are_forgotten,
    "poison is forgotten": _poison_is_forgotten,
    "poisoned requests are tried on": _poisoned_requests_are_tried_on,
    "clients are waited for without a bound": _clients_are_waited_for_without_a_bound,
    "calls stay with a worker that hangs": _calls_stay_with_a_worker_that_hangs,
    "a generator is not advanced": _a_generator_is_not_advanced,
    "a resumed answer begins anew": _a_resumed_answer_begins_anew,
    "the last token received is not told": _the_last_token_received_is_not_told,
    "text comes twice": _text_comes_twice,
    "a resumed session has an old revision": _a_resumed_session_has_an_old_revision,
}
