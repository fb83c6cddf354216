"""The way of one request through the pools, as a state machine: events in, instructions out. Pure.

`handle(event, now_s)` returns what the driver has to do, in order. Drivers: `dispatcher` over gRPC, and
`cluster_sim.dispatch` in simulated time. What a journey owns:
    attempts      a prefill worker that is lost is tried again elsewhere so often as the limits say, a decode worker
                  too, while nothing comes of it; one that drains or was not reached counts as no attempt. A decode
                  worker that hangs may only be slow: it is left, gone back to a few times, and at last waited for
    the answer    what was emitted of it. A decode worker that is lost, hangs or drains in mid-stream costs a pause:
                  prompt and answer are prefilled in one pass, or pulled from one that drains, and generation goes on
    poison        a request during which two engines have died is tried no more (`poison` remembers it for others)
    exclusions    what failed the request gets it no more, or where there is no other (`exclusions`)
    the lease     on the KV that a prefill worker computed or a decode worker handed over: from that call until a
                  decode worker says that it has the KV. One that is still held at the end is released, on every path,
                  but not while a decode worker that was told of it may still pull: it would cache what others have
                  written there since. What broke off may have used it up, so a second attempt computes the prompt
    deadlines     of the request, of the hand-off, and of the wait for a decode worker
Source: the shape of dask's `WorkerState.handle_stimulus` and of h11's tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.dispatch.exclusions import Exclusions
from control_plane.dispatch.journey_steps import (
    AwaitPrompt,
    Begun,
    Blame,
    CallDecode,
    CallPrefill,
    Cause,
    Closed,
    Complete,
    CountPrompt,
    DecodeStarted,
    Emit,
    Ended,
    Event,
    Fail,
    Generated,
    HandedOver,
    Instruction,
    MarkDraining,
    Placed,
    PlaceDecode,
    PlacePrefill,
    Prefilled,
    PromptComplete,
    Release,
    Route,
    Stage,
    Suspect,
    WorkerLost,
)
from control_plane.model import lifecycle
from control_plane.model.job import NO_HANDOFF, RECOMPUTED, Job, Lease
from control_plane.model.worker_snapshot import WorkerSnapshot

Instructions = tuple[Instruction, ...]

_RETRY_AFTER_WORKER_LOST_MS = 1000
_RETRY_AFTER_NO_WORKER_MS = 2000
# Engines that one request may end.
MOST_DEATHS = 2
_POISON = Fail(Cause.POISON, f"{MOST_DEATHS} engines died while they worked on this request, it is not tried again")
_DEADLINE_PASSED = Fail(Cause.DEADLINE, "the request's deadline passed")


@dataclass(frozen=True, slots=True)
class JourneyLimits:
    """What one router allows each of its requests."""

    prefill_attempts: int
    # How long a request waits for a decode worker to come.
    worker_wait_s: float
    # From the first token on, until when a decode worker may be told of the lease, and how long it may pull then.
    handoff_deadline_s: float
    decode_attempts: int = 2
    # How often an answer that has begun goes on elsewhere.
    max_migrations: int = 16


class UnexpectedEvent(AssertionError):
    """An event that does not belong to the stage: a defect of the driver."""


class Journey:
    """One request. `job` is written to as it goes: route, timings, attempts, lifecycle."""

    def __init__(self, job: Job, limits: JourneyLimits) -> None:
        self.job = job
        self.stage = Stage.NOTHING
        self._limits = limits
        self._exclusions = Exclusions()
        self._lost = 0
        # Decode workers that were lost since one has generated anything.
        self._fruitless = 0
        self._worker: WorkerSnapshot | None = None
        self._lease: Lease | None = None
        self._was_prefilled = False
        self._prefilled_s = 0.0
        # A decode worker that was told of the lease may have pulled.
        self._is_used_up = False
        self._decode_started = False

    @property
    def lease(self) -> Lease | None:
        """What a worker may be keeping for the request."""
        return self._lease

    def handle(self, event: Event, now_s: float) -> Instructions:
        """What the driver has to do now. Raises UnexpectedEvent for what cannot come in this stage."""
        if isinstance(event, Closed):
            return self._close()
        handler = _HANDLERS.get((self.stage, type(event)))
        if handler is None:
            raise UnexpectedEvent(f"{self.job.request_id}: no {type(event).__name__} while {self.stage.value}")
        return handler(self, event, now_s)

    def check_invariants(self) -> None:
        """A lease is held by who may have to release it, and by nobody once the request is over."""
        assert self._lease is None or self.stage is not Stage.OVER
        assert self._worker is not None or self.stage not in {Stage.PREFILL, Stage.DECODE, Stage.DECODE_CALL_ENDS}
        assert self._lost <= self._limits.prefill_attempts and self._fruitless <= self._limits.decode_attempts

    # Prefill.

    def _begin(self, event: Begun, now_s: float) -> Instructions:
        return self._seek_prefill_worker()

    def _seek_prefill_worker(self) -> Instructions:
        if self._limits.prefill_attempts < 1:
            return self._decode_alone()
        return self._await(Stage.ROUTE, Route())

    def _placed_for_prefill(self, event: Placed, now_s: float) -> Instructions:
        pulled_soon = self._hands_off and event.prompt_is_whole
        if event.worker is None or (pulled_soon and not event.decode_is_usable):
            return self._decode_alone()
        if now_s >= self.job.deadline_s:
            return self._fail(_DEADLINE_PASSED)
        self.job.lifecycle.at(lifecycle.Event.PLACED)
        self._worker = event.worker
        self._lease = Lease(event.worker, self.job.attempt_id())
        if not self.job.migrations:
            self.job.dispatched_s = now_s
        call = CallPrefill(event.worker, self._lease.lease_id, self._hands_off, self.job.deadline_s)
        return self._await(Stage.PREFILL, call)

    def _prefill_lost(self, event: WorkerLost, now_s: float) -> Instructions:
        self._lost += event.is_attempt
        worker, told = self._set_aside(event)
        self._exclusions.prefill_lost(worker)
        released = self._released()
        if self._is_poison:
            return (*told, *released, *self._fail(_POISON))
        if self._lost >= self._limits.prefill_attempts:
            return (*told, *released, *self._decode_alone())
        return (*told, *released, *self._await(Stage.PREFILL_WORKER, PlacePrefill(self._exclusions.excluded)))

    def _prefilled(self, event: Prefilled, now_s: float) -> Instructions:
        job = self.job
        assert self._worker is not None
        counted = self._counted()
        if not job.migrations:
            job.route.prefill_worker_id = self._worker.worker_id
            job.cached_tokens = event.cached_tokens
            job.engine_queue_ms = event.engine_queue_ms
        job.first_token_s = job.first_token_s or now_s
        self._may_be_pulled(self._worker, now_s)
        emitted = self._emit(event.first, event.token_ids, event.chars)
        if event.finish_reason is not None:
            # Nothing is kept of a prompt whose answer has ended.
            self._lease = None
            return (*counted, emitted, *self._complete(event.finish_reason, event.completion_tokens))
        job.lifecycle.at(lifecycle.Event.FIRST_TOKEN)
        return (*counted, emitted, *self._seek_decode_worker(now_s))

    def _may_be_pulled(self, worker: WorkerSnapshot, now_s: float) -> None:
        self.job.prefilled_by = worker.worker_id
        self._was_prefilled, self._is_used_up = True, False
        self._prefilled_s = now_s

    def _decode_alone(self) -> Instructions:
        return self._await(Stage.PROMPT, AwaitPrompt())

    def _prompt_complete(self, event: PromptComplete, now_s: float) -> Instructions:
        self.job.lifecycle.at(lifecycle.Event.PLACED_DECODE_ONLY)
        return (*self._counted(), *self._seek_decode_worker(now_s))

    def _counted(self) -> Instructions:
        """A prompt is asked for once, wherever its answer goes on."""
        return () if self.job.emitted else (CountPrompt(),)

    # Decode.

    def _seek_decode_worker(self, now_s: float, *, again: bool = False) -> Instructions:
        """again: one has been lost, and those that the request is kept from stay so."""
        if not again:
            self._exclusions.begin_anew()
        if now_s >= self.job.deadline_s:
            return self._fail(_DEADLINE_PASSED)
        prefills = not self._was_prefilled or self._is_used_up
        kept_from, bounds = self._exclusions, (self._limits.worker_wait_s, self.job.deadline_s)
        place = PlaceDecode(kept_from.excluded, prefills, *bounds, kept_from.avoided)
        return self._await(Stage.DECODE_WORKER, place)

    def _placed_for_decode(self, event: Placed, now_s: float) -> Instructions:
        job = self.job
        if now_s >= job.deadline_s:
            return self._fail(_DEADLINE_PASSED)
        if event.worker is None:
            sentence = f"no decode worker was ready for {self._limits.worker_wait_s:.1f} s"
            return self._fail(Fail(Cause.NO_DECODE_WORKER, sentence, _RETRY_AFTER_NO_WORKER_MS))
        self._worker = event.worker
        job.route.decode_worker_id = event.worker.worker_id
        job.dispatched_s = job.dispatched_s or now_s
        call = CallDecode(
            event.worker,
            job.attempt_id(),
            pulls=self._tell_of_lease(event.worker, now_s),
            may_move=self._may_migrate,
            hung=self._exclusions.left_for_good,
            until_s=job.deadline_s,
        )
        return self._await(Stage.DECODE, call)

    def _tell_of_lease(self, worker: WorkerSnapshot, now_s: float) -> bool:
        """Whether the worker pulls, never the lease's own. From now on the lease is not safe to release for a while."""
        deadline_s = self._limits.handoff_deadline_s
        # By the router's own clock too.
        is_late = now_s - self._prefilled_s >= deadline_s
        if self._lease is None or self._is_used_up or is_late or self._lease.worker.worker_id == worker.worker_id:
            return False
        self._lease.safe_at_s = now_s + deadline_s
        return True

    def _started(self, event: DecodeStarted, now_s: float) -> Instructions:
        job = self.job
        job.lifecycle.at(lifecycle.Event.DECODE_STARTED)
        self._decode_started = True
        lease = self._lease
        # The worker that has prefilled decodes as well: it finds what it has in its own cache.
        in_place = lease is not None and lease.worker == self._worker
        recomputed = event.handoff == RECOMPUTED or (lease is not None and event.handoff == NO_HANDOFF and not in_place)
        if not job.migrations:
            job.route.handoff = RECOMPUTED if recomputed else event.handoff
            job.route.kv_bytes, job.route.kv_descriptors = event.kv_bytes, event.kv_descriptors
            job.route.pulled_tokens = event.pulled_tokens
            job.transfer_ms = event.transfer_ms
            if lease is None:
                job.cached_tokens = event.cached_tokens
        if lease is None or not (recomputed or in_place):
            # It was pulled, and ended with that.
            self._lease = None
            return ()
        if event.handoff == RECOMPUTED:
            # The worker that was told of the lease says so itself; another worker's word is not enough.
            lease.safe_at_s = 0.0
        return self._released()

    def _generated(self, event: Generated, now_s: float) -> Instructions:
        self.job.first_token_s = self.job.first_token_s or now_s
        self._fruitless = 0
        self._exclusions.generated()
        return (self._emit(event.piece, event.token_ids, event.chars),)

    def _ended(self, event: Ended, now_s: float) -> Instructions:
        self.job.first_token_s = self.job.first_token_s or now_s
        last = () if event.piece is None else (Emit(event.piece),)
        completed = self._complete(event.finish_reason, event.completion_tokens)
        self.stage = Stage.DECODE_CALL_ENDS
        return (*last, *completed)

    def _lost_after_the_answer(self, event: WorkerLost, now_s: float) -> Instructions:
        """Nothing is missing of the answer; others should know of the worker."""
        worker = self._worker
        assert worker is not None
        return (MarkDraining(worker) if event.is_draining else Suspect(worker, event.sentence),)

    def _decode_lost(self, event: WorkerLost, now_s: float) -> Instructions:
        worker, told = self._set_aside(event)
        self._exclusions.decode_lost(worker, event)
        self._fruitless += event.is_attempt and not event.has_stalled
        self._is_used_up |= event.may_have_pulled
        if self._is_poison:
            return (*told, *self._fail(_POISON))
        if self._fruitless >= self._limits.decode_attempts or (self._decode_started and not self._may_migrate):
            lost = Fail(Cause.DECODE_WORKER_LOST, event.sentence, _RETRY_AFTER_WORKER_LOST_MS)
            return (*told, *self._fail(lost))
        return (*told, *(self._migrate() if self._decode_started else self._seek_decode_worker(now_s, again=True)))

    @property
    def _may_migrate(self) -> bool:
        return self.job.migrations < self._limits.max_migrations

    def _migrate(self) -> Instructions:
        """From the beginning, with the answer so far behind the prompt."""
        self._count_migration()
        self._was_prefilled = False
        self._exclusions.begin_anew()
        self._lost = 0
        return self._seek_prefill_worker()

    def _handed_over(self, event: HandedOver, now_s: float) -> Instructions:
        """Straight to another decode worker, which pulls from this one."""
        worker, self._worker = self._worker, None
        assert worker is not None
        self.job.lifecycle.at(lifecycle.Event.HANDED_OVER)
        self._count_migration()
        self._lease = Lease(worker, event.lease_id)
        self._may_be_pulled(worker, now_s)
        self._exclusions.handed_over(worker)
        return self._seek_decode_worker(now_s, again=True)

    def _count_migration(self) -> None:
        self.job.migrations = self.job.route.migrations = self.job.migrations + 1
        self._decode_started = False

    # Both.

    @property
    def _is_poison(self) -> bool:
        return self.job.deaths >= MOST_DEATHS

    @property
    def _hands_off(self) -> bool:
        return self.job.max_tokens - len(self.job.emitted) > 1

    def _emit(self, piece: Any, token_ids: Sequence[int], chars: int) -> Emit:
        self.job.emitted.extend(token_ids)
        self.job.emitted_chars += chars
        return Emit(piece)

    def _set_aside(self, event: WorkerLost) -> tuple[WorkerSnapshot, Instructions]:
        """The worker that has the request no more, and what others are told of it; one that drains gets nothing."""
        worker = self._worker
        assert worker is not None
        self.job.lifecycle.at(lifecycle.Event.WORKER_LOST)
        self._worker = None
        if event.is_draining:
            # That one drains which is left is known from the registry, and may be over by now.
            return worker, () if event.was_left else (MarkDraining(worker),)
        if event.lacks_adapter:
            return worker, ()
        return worker, (Suspect(worker, event.sentence), *self._blamed(worker, event))

    def _blamed(self, worker: WorkerSnapshot, event: WorkerLost) -> Instructions:
        if not event.has_died:
            return ()
        self.job.deaths += 1
        return (Blame(worker),)

    def _released(self) -> Instructions:
        lease, self._lease = self._lease, None
        return () if lease is None else (Release(lease),)

    def _await(self, stage: Stage, call: Instruction) -> Instructions:
        self.stage = stage
        return (call,)

    def _complete(self, finish_reason: int, completion_tokens: int) -> Instructions:
        self.stage = Stage.NOTHING
        self.job.lifecycle.at(lifecycle.Event.ENDED)
        return (Complete(finish_reason, completion_tokens),)

    def _fail(self, failure: Fail) -> Instructions:
        self.stage = Stage.NOTHING
        return (failure,)

    def _close(self) -> Instructions:
        self.stage = Stage.OVER
        return self._released()


_HANDLERS: dict[tuple[Stage, type[Event]], Callable[..., Instructions]] = {
    (Stage.NOTHING, Begun): Journey._begin,
    (Stage.ROUTE, Placed): Journey._placed_for_prefill,
    (Stage.PREFILL_WORKER, Placed): Journey._placed_for_prefill,
    (Stage.PREFILL, Prefilled): Journey._prefilled,
    (Stage.PREFILL, WorkerLost): Journey._prefill_lost,
    (Stage.PROMPT, PromptComplete): Journey._prompt_complete,
    (Stage.DECODE_WORKER, Placed): Journey._placed_for_decode,
    (Stage.DECODE, DecodeStarted): Journey._started,
    (Stage.DECODE, Generated): Journey._generated,
    (Stage.DECODE, Ended): Journey._ended,
    (Stage.DECODE, HandedOver): Journey._handed_over,
    (Stage.DECODE, WorkerLost): Journey._decode_lost,
    (Stage.DECODE_CALL_ENDS, WorkerLost): Journey._lost_after_the_answer,
}
