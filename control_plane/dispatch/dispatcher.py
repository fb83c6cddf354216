"""The way of one request through the pools: place, prefill, first token out, hand off, decode.

Who holds what while it runs:
    admission slot        from the queue until the request has ended
    worker's in-flight    from the call to a worker until that call has ended
    lease on KV blocks    from the prefill call until the decode worker says that it has the blocks; a lease that
                          is still held at the end is released, on every path, but not while a decode worker that
                          was told of it may still pull: it would cache what others have written there since

A decode worker is told of a lease once. What broke off may have used it up, so a second attempt computes the prompt.

No engine and no gRPC server is known here: `router` feeds it validated requests and turns what it yields into
messages.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.errors import RachisError, UnavailableError
from control_plane.dispatch.prefilling import Prefilling, WholePrompt
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.fleet.worker_client import WorkerClient, WorkerDrainingError, WorkerLostError
from control_plane.model.job import Job, Lease
from control_plane.model.lifecycle import Event
from control_plane.model.limits import max_tokens_of
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.placement.disaggregation import LOCAL
from control_plane.placement.placer import Placement, Placer

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
OVERHEAD_SAMPLES = 10_000
DECODE_ATTEMPTS = 2


Piece = generation.CompletionDelta | generation.Completion


class Dispatcher:
    """Runs jobs. One per router; `close` waits for what it still has to release."""

    def __init__(
        self,
        membership: Membership,
        follower: RegistryFollower,
        client: WorkerClient,
        placer: Placer,
        *,
        prefill_attempts: int,
        worker_wait_s: float,
        handoff_deadline_s: float,
    ) -> None:
        self._membership = membership
        self._follower = follower
        self._client = client
        self._placer = placer
        self._prefill_attempts = prefill_attempts
        self._worker_wait_s = worker_wait_s
        self._handoff_deadline_s = handoff_deadline_s
        self._background: set[asyncio.Task[None]] = set()
        self.overhead_ms: deque[float] = deque(maxlen=OVERHEAD_SAMPLES)

    async def run(self, job: Job, prefilling: Prefilling | None = None) -> AsyncIterator[Piece]:
        """Yields deltas as they come, then the completion. Closing it early frees all that is held.

        `prefilling` brings the prompt to a prefill worker; by default whole, as the job has it.
        """
        leases: list[Lease] = []
        try:
            response = await self._prefill(job, prefilling or WholePrompt(self._client, job), leases)
            self._placer.keep(job)
            if response is not None:
                job.first_token_s = monotonic_s()
                yield response.first
                if response.finish_reason != generation.FINISH_REASON_UNSPECIFIED:
                    leases.clear()
                    job.lifecycle.at(Event.ENDED)
                    yield self._completion(job, response.finish_reason, len(response.first.token_ids))
                    return
                job.lifecycle.at(Event.FIRST_TOKEN)
            async with aclosing(self._decode(job, response, leases)) as pieces:  # type: ignore[type-var]
                piece: Piece
                async for piece in pieces:
                    yield piece
        finally:
            self.overhead_ms.append(job.own_s * 1000)
            for lease in leases:
                self._in_background(self._release(lease))

    async def close(self) -> None:
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=RELEASE_TIMEOUT_S)
            for task in late:
                task.cancel()

    async def _prefill(self, job: Job, prefilling: Prefilling, leases: list[Lease]) -> wire.PrefillResponse | None:
        """The first token and its lease, or None when the decode pool has to do without a prefill worker."""
        excluded: set[tuple[str, int]] = set()
        hand_off = max_tokens_of(job.sampling) > 1
        lost = 0
        while lost < self._prefill_attempts:
            started_s = monotonic_s()
            if not excluded and self._placer.weigh(job, is_whole=prefilling.is_whole) in LOCAL:
                break
            placement = self._placer.place(job, wire.POOL_PREFILL, frozenset(excluded))
            pull_is_near = hand_off and prefilling.is_whole
            if placement is None or (pull_is_near and not self._membership.usable(wire.POOL_DECODE)):
                break
            worker = placement.worker
            job.lifecycle.at(Event.PLACED)
            lease = Lease(worker, job.attempt_id())
            leases.append(lease)
            job.dispatched_s = monotonic_s()
            job.own_s += job.dispatched_s - started_s
            try:
                with self._placer.in_flight(placement):
                    response = await prefilling.attempt(worker, lease.lease_id, hand_off=hand_off)
            except WorkerLostError as error:
                self._lost(job, worker, error)
                leases.remove(lease)
                self._in_background(self._release(lease))
                excluded.add((worker.worker_id, worker.generation))
                lost += not isinstance(error, WorkerDrainingError)
                continue
            job.route.prefill_worker_id = worker.worker_id
            job.cached_tokens = response.cached_tokens
            job.engine_queue_ms = response.engine_queue_ms
            return response
        await prefilling.without_worker()
        return None

    async def _decode(
        self, job: Job, prefilled: wire.PrefillResponse | None, leases: list[Lease]
    ) -> AsyncIterator[Piece]:
        """Deltas and the completion from a decode worker; tried on another one until the first of its messages."""
        excluded: set[tuple[str, int]] = set()
        if prefilled is None:
            job.lifecycle.at(Event.PLACED_DECODE_ONLY)
        lost = 0
        while True:
            prefills = prefilled is None or lost > 0
            placement = await self._wait_for_decode_worker(job, excluded, prefills=prefills)
            worker = placement.worker
            request = self._decode_request(job, prefilled, worker, [] if lost else leases)
            started = False
            try:
                with self._placer.in_flight(placement) as flight:
                    messages = self._client.decode(worker, request, job.remaining_s())
                    async with aclosing(messages) as stream:  # type: ignore[type-var]
                        message: wire.DecodeResponse
                        async for message in stream:
                            if message.HasField("started"):
                                started = True
                                flight.prefilled()
                                self._started(job, worker, message.started, leases)
                            else:
                                yield self._piece(job, message)
                if not job.lifecycle.ended:
                    raise WorkerLostError(f"worker {worker.worker_id} ended the stream early")
                return
            except WorkerLostError as error:
                # Who drains has not looked at the lease.
                lost += not isinstance(error, WorkerDrainingError)
                if started or lost == DECODE_ATTEMPTS:
                    self._membership.suspect(worker, monotonic_s())
                    raise UnavailableError(str(error), retry_after_ms=1000) from None
                self._lost(job, worker, error)
                excluded.add((worker.worker_id, worker.generation))

    def _decode_request(
        self, job: Job, prefilled: wire.PrefillResponse | None, worker: WorkerSnapshot, leases: list[Lease]
    ) -> wire.DecodeRequest:
        """`leases` that the worker may pull; none tells it to compute the prompt."""
        job.route.decode_worker_id = worker.worker_id
        if not job.dispatched_s:
            job.dispatched_s = monotonic_s()
        request = wire.DecodeRequest(
            request_id=job.attempt_id(),
            generation=worker.generation,
            token_ids=job.token_ids,
            sampling=job.sampling,
            cache_salt=job.cache_salt,
            priority=job.priority,
        )
        if prefilled is not None:
            # By the router's own clock too: a worker's may be wrong.
            now = monotonic_s()
            if leases and now - job.first_token_s < self._handoff_deadline_s:
                request.handoff.CopyFrom(prefilled.handoff)
                for lease in leases:
                    lease.safe_at_s = now + self._handoff_deadline_s
            request.first.token_id = prefilled.first.token_ids[0]
            request.first.sent_text = prefilled.first.text
        return request

    def _started(self, job: Job, worker: WorkerSnapshot, started: wire.DecodeStarted, leases: list[Lease]) -> None:
        job.lifecycle.at(Event.DECODE_STARTED)
        job.route.handoff = started.handoff
        if leases and started.handoff == generation.HANDOFF_OUTCOME_NONE:
            job.route.handoff = generation.HANDOFF_OUTCOME_RECOMPUTED
        job.route.kv_bytes = started.kv_bytes
        job.route.pulled_tokens = started.pulled_tokens
        job.transfer_ms = started.transfer_ms
        if not leases:
            job.cached_tokens = started.cached_tokens
        if job.route.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED:
            for lease in leases:
                if started.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED:
                    # The worker that was told of the lease says so itself; another's word is not enough.
                    lease.safe_at_s = 0.0
                self._in_background(self._release(lease))
        leases.clear()

    def _piece(self, job: Job, message: wire.DecodeResponse) -> Piece:
        if not job.first_token_s:
            job.first_token_s = monotonic_s()
        if message.HasField("delta"):
            return message.delta
        job.lifecycle.at(Event.ENDED)
        return self._completion(job, message.end.finish_reason, message.end.completion_tokens)

    def _completion(self, job: Job, reason: generation.FinishReason.ValueType, tokens: int) -> generation.Completion:
        now = monotonic_s()
        router_queue_ms = (job.dispatched_s - job.arrived_s) * 1000
        return generation.Completion(
            finish_reason=reason,
            usage=generation.Usage(
                prompt_tokens=len(job.token_ids), completion_tokens=tokens, cached_tokens=job.cached_tokens
            ),
            timings=generation.Timings(
                queue_ms=router_queue_ms + job.engine_queue_ms,
                prefill_ms=(job.first_token_s - job.dispatched_s) * 1000 - job.engine_queue_ms,
                transfer_ms=job.transfer_ms,
                decode_ms=(now - job.first_token_s) * 1000,
                ttft_ms=(job.first_token_s - job.arrived_s) * 1000,
            ),
            route=job.route,
        )

    async def _wait_for_decode_worker(self, job: Job, excluded: set[tuple[str, int]], *, prefills: bool) -> Placement:
        """A decode worker, waiting a bounded time for one to come back. Raises UnavailableError."""
        wait_s = min(self._worker_wait_s, job.remaining_s())
        try:
            async with asyncio.timeout(wait_s), self._follower.changed:
                while True:
                    placement = self._placer.place(job, wire.POOL_DECODE, frozenset(excluded), prefills=prefills)
                    if placement is not None:
                        return placement
                    await self._follower.changed.wait()
        except TimeoutError:
            job.remaining_s()
            raise UnavailableError(f"no decode worker was ready for {wait_s:.1f} s", retry_after_ms=2000) from None

    def _lost(self, job: Job, worker: WorkerSnapshot, error: RachisError) -> None:
        job.lifecycle.at(Event.WORKER_LOST)
        if isinstance(error, WorkerDrainingError):
            self._membership.drains(worker)
            return
        logger.warning("%s: %s", job.request_id, error)
        self._membership.suspect(worker, monotonic_s())

    async def _release(self, lease: Lease) -> None:
        await asyncio.sleep(max(0.0, lease.safe_at_s - monotonic_s()))
        try:
            await self._client.release(lease.worker, lease.lease_id, RELEASE_TIMEOUT_S)
        except RachisError as error:
            logger.info("lease %s ends by itself: %s", lease.lease_id, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
