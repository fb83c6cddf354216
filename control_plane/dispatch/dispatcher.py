"""Carries out journeys over gRPC: calls workers, writes to the client, releases leases.

Who holds what while a request runs:
    admission slot        from the queue until the request has ended (`control_plane.intake.admission`)
    worker's in-flight    from the call to a worker until that call has ended (`worker_calls`)
    lease on KV blocks    the journey, which says when it is released; the release itself may outlive the request

No engine and no gRPC server is known here: `control_plane.server.router_service` brings validated requests and turns
what comes of them into messages.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import cast

from rachis.v1 import generation_pb2 as generation

from cluster_core.background import BackgroundTasks
from cluster_core.clock import monotonic_s
from cluster_core.errors import DeadlineError, PoisonedRequestError, RachisError, UnavailableError
from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.journey import MOST_DEATHS, Journey, JourneyLimits
from control_plane.dispatch.poison import PoisonMemory
from control_plane.dispatch.prefilling import Prefilling
from control_plane.dispatch.worker_calls import WorkerCalls
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import WorkerClient
from control_plane.fleet.worker_probes import WorkerProbes
from control_plane.model import lifecycle
from control_plane.model.job import Job, Lease
from control_plane.model.request_trace import Answered, TraceStage
from control_plane.placement.placer import Placer

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
OVERHEAD_SAMPLES = 10_000

Piece = generation.CompletionDelta | generation.Completion


class Dispatcher:
    """Runs jobs. One per router; `close` waits for what it still has to release."""

    def __init__(
        self,
        membership: Membership,
        workers_changed: asyncio.Condition,
        client: WorkerClient,
        placer: Placer,
        limits: JourneyLimits,
        probes: WorkerProbes,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._membership = membership
        self._workers_changed = workers_changed
        self._client = client
        self._placer = placer
        self._limits = limits
        self._probes = probes
        self._now_s = now_s
        self._releases = BackgroundTasks()
        self.poison = PoisonMemory()
        self.overhead_ms: deque[float] = deque(maxlen=OVERHEAD_SAMPLES)

    @property
    def pending_releases(self) -> int:
        """Leases that are still to be released."""
        return len(self._releases)

    async def run(self, job: Job, prefilling: Prefilling | None = None) -> AsyncIterator[Piece]:
        """Yields deltas as they come, then the completion. Closing it early frees all that is held.

        `prefilling` brings the prompt to a prefill worker; by default whole, as the job has it.
        Raises DeadlineError, UnavailableError, PoisonedRequestError, and what a worker refuses the request with.
        """
        if job.finish_reason:
            yield self._completed_before(job)
            return
        self._refuse_poison(job)
        journey = Journey(job, self._limits)
        calls = WorkerCalls(
            job,
            prefilling,
            self._client,
            self._placer,
            self._membership,
            self._workers_changed,
            self._probes,
            self._now_s,
        )
        waiting: deque[steps.Instruction] = deque(journey.handle(steps.Begun(), self._now_s()))
        completion_tokens, failed = 0, False
        try:
            while waiting:
                async with aclosing(calls.carry_out(waiting.popleft())) as events:  # type: ignore[type-var]
                    event: steps.Event
                    async for event in events:
                        for instruction in journey.handle(event, self._now_s()):
                            match instruction:
                                case steps.Emit(piece):
                                    yield _with_adapter(job, piece)
                                case steps.Complete(reason, tokens):
                                    self.poison.absolve(job)
                                    now_s, completion_tokens = self._now_s(), tokens
                                    job.lifecycle.trace.enter(TraceStage.COMPLETION, now_s)
                                    yield _completion(job, reason, tokens, now_s)
                                case steps.Fail():
                                    failed = True
                                    raise _error_of(instruction)
                                case _ if not self._done(job, instruction):
                                    waiting.append(instruction)
        finally:
            self.overhead_ms.append(job.own_s * 1000)
            answer_tokens = completion_tokens or len(job.emitted)
            if answer_tokens and not failed:
                self._placer.answered(job, answer_tokens)
            job.lifecycle.trace.answered = _answered(job, answer_tokens)
            for instruction in journey.handle(steps.Closed(), self._now_s()):
                self._done(job, instruction)

    def _completed_before(self, job: Job) -> generation.Completion:
        job.lifecycle.at(lifecycle.Event.ENDED)
        job.dispatched_s = job.first_token_s = now_s = self._now_s()
        return _completion(job, job.finish_reason, len(job.emitted), now_s)

    def _refuse_poison(self, job: Job) -> None:
        job.deaths = self.poison.deaths(job, self._now_s())
        if job.deaths >= MOST_DEATHS:
            raise PoisonedRequestError(
                f"{job.deaths} engines died while they worked on a request like this, it is refused until none has for "
                f"{self.poison.remember_s:g} s"
            )

    async def close(self) -> None:
        await self._releases.wait(RELEASE_TIMEOUT_S)

    def _done(self, job: Job, instruction: steps.Instruction) -> bool:
        """Carries out what takes no time; False for a call."""
        match instruction:
            case steps.CountPrompt():
                self._placer.keep(job)
            case steps.Suspect(worker, sentence):
                logger.warning("%s", sentence)
                self._membership.suspect(worker)
            case steps.Blame(worker):
                logger.error("an engine died while it worked on it, the %d. of them", job.deaths)
                self.poison.blame(job, worker, self._now_s())
            case steps.MarkDraining(worker):
                self._membership.drains(worker)
            case steps.Release(lease):
                self._releases.start(self._release(lease))
            case _:
                return False
        return True

    async def _release(self, lease: Lease) -> None:
        await asyncio.sleep(max(0.0, lease.safe_at_s - self._now_s()))
        try:
            await self._client.release(lease.worker, lease.lease_id, RELEASE_TIMEOUT_S)
        except RachisError as error:
            logger.info("lease %s ends by itself: %s", lease.lease_id, error)


def _with_adapter(job: Job, piece: generation.CompletionDelta) -> generation.CompletionDelta:
    """The first piece says whose answer it is."""
    if job.scope.adapter is not None and not job.adapter_is_told:
        job.adapter_is_told, piece.adapter = True, job.scope.adapter_digest
    return piece


def _answered(job: Job, completion_tokens: int) -> Answered:
    return Answered(len(job.token_ids), job.cached_tokens, completion_tokens, job.route)


def _error_of(failure: steps.Fail) -> RachisError:
    if failure.cause is steps.Cause.DEADLINE:
        return DeadlineError(failure.sentence)
    if failure.cause is steps.Cause.POISON:
        return PoisonedRequestError(failure.sentence)
    return UnavailableError(failure.sentence, retry_after_ms=failure.retry_after_ms)


def _completion(job: Job, reason: int, tokens: int, now_s: float) -> generation.Completion:
    router_queue_ms = (job.dispatched_s - job.arrived_s) * 1000
    return generation.Completion(
        finish_reason=cast(generation.FinishReason.ValueType, reason),
        usage=generation.Usage(
            prompt_tokens=len(job.token_ids), completion_tokens=tokens, cached_tokens=job.cached_tokens
        ),
        timings=generation.Timings(
            queue_ms=router_queue_ms + job.engine_queue_ms,
            prefill_ms=(job.first_token_s - job.dispatched_s) * 1000 - job.engine_queue_ms,
            transfer_ms=job.transfer_ms,
            decode_ms=(now_s - job.first_token_s) * 1000,
            ttft_ms=(job.first_token_s - job.arrived_s) * 1000,
        ),
        route=job.route,
    )
