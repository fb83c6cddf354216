"""The calls of one journey: each instruction that waits, carried out, and what came of it as events.

One call at a time. A worker counts the request as in flight from the call to its end, whatever ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.handing_over import HandOver
from control_plane.dispatch.prefilling import Prefilling, WholePrompt, names_of, say_emitted
from control_plane.dispatch.stage_times import note_decode, note_prefill
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import (
    WorkerClient,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerLacksAdapterError,
    WorkerLeftError,
    WorkerLostError,
    WorkerStalledError,
    WorkerUnreachableError,
)
from control_plane.fleet.worker_probes import WorkerProbes
from control_plane.model.job import Job
from control_plane.model.request_trace import TraceStage
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.placement.placer import Placement, Placer


class WorkerCalls:
    """Made for one job. prefilling: brings the prompt to a prefill worker; None: whole, as the job has it."""

    def __init__(
        self,
        job: Job,
        prefilling: Prefilling | None,
        client: WorkerClient,
        placer: Placer,
        membership: Membership,
        workers_changed: asyncio.Condition,
        probes: WorkerProbes,
        now_s: Callable[[], float],
    ) -> None:
        self._job = job
        self._trace = job.lifecycle.trace
        self._whole = WholePrompt(client, job, now_s)
        self._prefilling = prefilling or self._whole
        self._client = client
        self._placer = placer
        self._membership = membership
        self._workers_changed = workers_changed
        self._probes = probes
        self._now_s = now_s
        # Of the call that comes next.
        self._placement: Placement | None = None
        self._handoff: wire.KvHandoff | None = None

    @property
    def _way(self) -> Prefilling:
        """An answer that goes on elsewhere has its whole prompt, however that came."""
        return self._whole if self._job.emitted else self._prefilling

    def carry_out(self, call: steps.Instruction) -> AsyncIterator[steps.Event]:
        """Events until the call has ended. Raises what ends the request without another try."""
        match call:
            case steps.Route():
                return self._route()
            case steps.PlacePrefill(excluded):
                return self._place_prefill(excluded)
            case steps.AwaitPrompt():
                return self._await_prompt()
            case steps.CallPrefill():
                return self._prefill(call)
            case steps.PlaceDecode():
                return self._place_decode(call)
            case steps.CallDecode():
                return self._decode(call)
            case _:
                raise AssertionError(f"{call} is no call")

    async def _route(self) -> AsyncIterator[steps.Event]:
        started_s = self._entered(TraceStage.PLACEMENT)
        is_whole = self._way.is_whole
        self._placement = self._placer.route(self._job, is_whole=is_whole)
        yield self._placed_for_prefill(is_whole=is_whole, since_s=started_s)

    async def _place_prefill(self, excluded: steps.Excluded) -> AsyncIterator[steps.Event]:
        if self._membership.usable(wire.POOL_PREFILL):
            await self._way.may_go_on()
        started_s = self._entered(TraceStage.PLACEMENT)
        self._placement = self._placer.place(self._job, wire.POOL_PREFILL, excluded, avoided=self._avoided(excluded))
        yield self._placed_for_prefill(is_whole=self._way.is_whole, since_s=started_s)

    def _placed_for_prefill(self, *, is_whole: bool, since_s: float) -> steps.Placed:
        worker = self._placement.worker if self._placement is not None else None
        placed = steps.Placed(worker, is_whole, bool(self._membership.usable(wire.POOL_DECODE)))
        self._job.own_s += self._now_s() - since_s
        return placed

    async def _await_prompt(self) -> AsyncIterator[steps.Event]:
        if not self._way.is_whole:
            self._entered(TraceStage.INPUT)
        await self._way.without_worker()
        yield steps.PromptComplete()

    async def _prefill(self, call: steps.CallPrefill) -> AsyncIterator[steps.Event]:
        flight = self._placer.begin(self._taken_placement())
        try:
            is_owed = self._way.is_whole
            self._entered(TraceStage.PREFILL_CALL if is_owed else TraceStage.INPUT, call.worker)
            async with self._probes.waiting_for(call.worker, self._may_leave_prefill, is_owed=is_owed):
                response = await self._way.attempt(call.worker, call.lease_id, hand_off=call.hand_off)
            flight.prefilled()
        except WorkerLostError as error:
            self._trace.left_worker(self._now_s(), str(error))
            event: steps.Event = _lost(error)
        else:
            note_prefill(self._trace, response, self._now_s())
            self._handoff = response.handoff
            event = _prefilled(response, len(self._job.emitted))
        finally:
            flight.end()
        yield event

    async def _place_decode(self, call: steps.PlaceDecode) -> AsyncIterator[steps.Event]:
        """The lock is held from one look to the wait, so that no change in between goes unnoticed."""
        self._placement = None
        self._entered(TraceStage.DECODE_PLACEMENT)
        try:
            async with asyncio.timeout(call.most_s(self._now_s())), self._workers_changed:
                while (placement := self._place_for_decode(call)) is None:
                    await self._workers_changed.wait()
                self._placement = placement
        except TimeoutError:
            yield steps.Placed(None)
        else:
            yield steps.Placed(placement.worker)

    def _place_for_decode(self, call: steps.PlaceDecode) -> Placement | None:
        return self._placer.place(
            self._job,
            wire.POOL_DECODE,
            call.excluded,
            avoided=call.avoided | self._avoided(call.excluded | call.avoided),
            prefills=call.prefills,
        )

    def _avoided(self, excluded: steps.Excluded) -> steps.Excluded:
        """A second try is mostly the last one."""
        return self._probes.doubtful() if excluded else frozenset()

    async def _decode(self, call: steps.CallDecode) -> AsyncIterator[steps.Event]:
        request = self._decode_request(call)
        self._entered(TraceStage.DECODE_CALL, call.worker)
        flight = self._placer.begin(self._taken_placement())
        has_ended = False
        try:
            async with aclosing(self._messages(call, request)) as stream:  # type: ignore[type-var]
                message: wire.DecodeResponse
                async for message in stream:
                    match message.WhichOneof("event"):
                        case "started":
                            flight.prefilled()
                            note_decode(self._trace, message.started, self._now_s())
                            yield _started(message.started)
                        case "delta":
                            yield steps.Generated(message.delta, message.delta.token_ids, len(message.delta.text))
                        case "handed_over":
                            self._handoff = message.handed_over
                            self._trace.left_worker(self._now_s(), call.worker.worker_id, handed_over=True)
                            yield steps.HandedOver(message.handed_over.lease_id)
                            return
                        case _:
                            has_ended = True
                            yield _ended(message.end)
            if not has_ended:
                raise WorkerLostError(f"worker {call.worker.worker_id} ended the stream early")
        except WorkerLostError as error:
            if not has_ended:
                self._trace.left_worker(self._now_s(), str(error))
            lost = _lost(error)
        else:
            return
        finally:
            flight.end()
        yield lost

    def _entered(self, stage: TraceStage, worker: WorkerSnapshot | None = None) -> float:
        """Now, when the stage begins."""
        now_s = self._now_s()
        self._trace.enter(stage, now_s, "" if worker is None else worker.worker_id)
        return now_s

    async def _messages(
        self, call: steps.CallDecode, request: wire.DecodeRequest
    ) -> AsyncIterator[wire.DecodeResponse]:
        """What the worker sends. It may be left for another one at any time."""
        probes, worker = self._probes, call.worker
        has_started = False

        def may_leave(why: WorkerLostError) -> bool:
            """An answer that has begun and may not move waits for its worker."""
            return (call.may_move or not has_started) and self.may_leave_decode(why, call.hung)

        decode = self._client.decode(worker, request, call.until_s - self._now_s())
        hand_over = HandOver(self._client, call, decode)

        def move(why: WorkerLostError) -> None:
            if has_started:
                hand_over.begin(why)
            else:
                decode.leave(why)

        with (
            probes.owing(worker, is_owed=False),
            probes.watching(worker, may_leave, decode.leave, move=move if call.may_move else None),
        ):
            try:
                async with aclosing(decode.messages()) as stream:  # type: ignore[type-var]
                    with probes.owing(worker):
                        message: wire.DecodeResponse | None = await anext(stream, None)
                    while message is not None:
                        has_started = True
                        probes.heard(worker)
                        hand_over.read(message)
                        yield message
                        hand_over.reads()
                        message = await anext(stream, None)
            finally:
                await hand_over.end()

    def _may_leave_prefill(self, why: WorkerLostError) -> bool:
        return bool(self._membership.usable(wire.POOL_PREFILL)) or self.may_leave_decode(why)

    def may_leave_decode(self, why: WorkerLostError, hung: steps.Excluded = frozenset()) -> bool:
        """Whether there is another one; who hangs is suspect already. hung: no place to go to from one that hangs."""
        usable = self._membership.usable(wire.POOL_DECODE)
        if not isinstance(why, WorkerStalledError):
            return bool(usable)
        return any((each.worker_id, each.generation) not in hung for each in usable)

    def _decode_request(self, call: steps.CallDecode) -> wire.DecodeRequest:
        job = self._job
        request = wire.DecodeRequest(
            request_id=call.request_id,
            generation=call.worker.generation,
            token_ids=job.token_ids,
            sampling=job.sampling,
            cache_salt=job.scope.cache_salt,
            adapter=job.scope.adapter,
            priority=job.priority,
            named=names_of(job),
            tenant=job.share,
        )
        if call.pulls and self._handoff is not None:
            request.handoff.CopyFrom(self._handoff)
        say_emitted(request, job)
        return request

    def _taken_placement(self) -> Placement:
        placement, self._placement = self._placement, None
        assert placement is not None, "a worker is called without having been placed on"
        return placement


def _lost(error: WorkerLostError) -> steps.WorkerLost:
    return steps.WorkerLost(
        str(error),
        is_draining=isinstance(error, WorkerDrainingError),
        was_left=isinstance(error, WorkerLeftError),
        has_stalled=isinstance(error, WorkerStalledError),
        has_died=isinstance(error, WorkerDiedError),
        is_unreachable=isinstance(error, WorkerUnreachableError),
        lacks_adapter=isinstance(error, WorkerLacksAdapterError),
    )


def _prefilled(response: wire.PrefillResponse, emitted: int) -> steps.Prefilled:
    """emitted: tokens before."""
    is_over = response.finish_reason != generation.FINISH_REASON_UNSPECIFIED
    response.first.finish_reason = response.finish_reason
    return steps.Prefilled(
        response.first,
        response.first.token_ids,
        len(response.first.text),
        response.finish_reason if is_over else None,
        emitted + len(response.first.token_ids),
        response.cached_tokens,
        response.engine_queue_ms,
    )


def _ended(message: wire.DecodeEnd) -> steps.Ended:
    message.delta.finish_reason = message.finish_reason
    return steps.Ended(message.finish_reason, message.completion_tokens, message.delta)


def _started(message: wire.DecodeStarted) -> steps.DecodeStarted:
    return steps.DecodeStarted(
        message.handoff, message.cached_tokens, message.pulled_tokens, message.kv_bytes, message.transfer_ms,
        message.kv_descriptors,
    )  # fmt: skip
