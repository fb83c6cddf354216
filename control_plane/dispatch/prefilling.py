"""How a prompt gets to a prefill worker: whole, in one call, or in pieces while it arrives (`session_prefill`).

The dispatcher chooses workers and tries the next one when one is lost; this is one try.
"""

from collections.abc import Callable
from typing import Protocol

from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.worker_client import WorkerClient
from control_plane.model.job import Job
from control_plane.model.request_trace import ParentSpan
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.tracing import traceparent


class Prefilling(Protocol):
    @property
    def is_whole(self) -> bool:
        """Nothing more comes to the prompt: its first token is a matter of computing."""
        ...

    async def may_go_on(self) -> None:
        """Returns once another worker may compute what the one before had."""
        ...

    async def attempt(self, worker: WorkerSnapshot, request_id: str, *, hand_off: bool) -> wire.PrefillResponse:
        """One try on one worker. Raises WorkerLostError when another one may be tried."""
        ...

    async def without_worker(self) -> None:
        """No prefill worker is left: returns once the prompt is whole, for the decode worker to compute."""
        ...


class WholePrompt:
    """The prompt of one job, known from the beginning."""

    is_whole = True

    def __init__(self, client: WorkerClient, job: Job, now_s: Callable[[], float]) -> None:
        self._client = client
        self._job = job
        self._now_s = now_s

    async def may_go_on(self) -> None:
        pass

    async def attempt(self, worker: WorkerSnapshot, request_id: str, *, hand_off: bool) -> wire.PrefillResponse:
        request = wire.PrefillRequest(
            request_id=request_id,
            generation=worker.generation,
            token_ids=self._job.token_ids,
            sampling=self._job.sampling,
            hand_off=hand_off,
            cache_salt=self._job.scope.cache_salt,
            adapter=self._job.scope.adapter,
            priority=self._job.priority,
            named=names_of(self._job),
            tenant=self._job.share,
        )
        say_emitted(request, self._job)
        return await self._client.prefill(worker, request, self._job.remaining_s(self._now_s()))

    async def without_worker(self) -> None:
        pass


def names_of(job: Job) -> wire.RequestNames:
    trace = job.lifecycle.trace
    span = ParentSpan(trace.trace_id, trace.span_id, trace.is_sampled)
    return wire.RequestNames(
        request_id=job.request_id, trace_id=f"{trace.trace_id:032x}", traceparent=traceparent.written(span)
    )


def say_emitted(request: wire.PrefillRequest | wire.DecodeRequest, job: Job) -> None:
    """The worker generates on from there."""
    if job.emitted:
        request.emitted.token_ids.extend(job.emitted)
        request.emitted.sent_chars = job.emitted_chars
