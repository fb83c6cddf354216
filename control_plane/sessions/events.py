"""What a session's client is told. One event is written at a time; who writes waits for the one before.

So nothing is queued: a client that does not read stops its own session, and progress is told as it stands when its turn
comes.
"""

import asyncio

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.errors import ClientFault
from cluster_wire import calls
from cluster_wire.calls import Context
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.model.job import Job
from control_plane.sessions.prefill import PromptInPieces


class SessionEvents:
    """Shared by the tasks of one session."""

    def __init__(
        self, context: Context, job: Job, pieces: PromptInPieces, metrics: RouterMetrics, send_timeout_s: float
    ) -> None:
        self._context = context
        self._job = job
        self._pieces = pieces
        self._metrics = metrics
        self._send_timeout_s = send_timeout_s
        self._turn = asyncio.Lock()
        # What is resumed had its first token elsewhere.
        self._answering = bool(job.emitted)

    async def accepted(self) -> None:
        event = api.SessionAccepted(prefill_worker_id=self._pieces.worker_id)
        await self._write(api.StreamGenerateResponse(accepted=event))

    async def progress(self, progress: generation.SessionProgress) -> None:
        await self._write(api.StreamGenerateResponse(progress=progress))

    async def refused(self, error: ClientFault, message_number: int) -> None:
        self._metrics.refused(error.status)
        event = api.SessionRefused(
            status=error.status, message=str(error), field=error.field, message_number=message_number
        )
        await self._write(api.StreamGenerateResponse(refused=event))

    async def piece(self, piece: generation.CompletionDelta | generation.Completion) -> None:
        """A part of the answer; the first one tells both TTFTs, the last one the session's record."""
        if isinstance(piece, generation.Completion):
            self._metrics.completed(piece, self._job.lifecycle.trace)
            await self._write(api.StreamGenerateResponse(completion=self._with_record(piece)))
        elif self._answering:
            await self._write(api.StreamGenerateResponse(delta=piece))
        else:
            self._answering = True
            ttft_ms = self._since(self._pieces.finished_s)
            self._metrics.first_token(ttft_ms / 1000, self._job.lifecycle.trace)
            event = api.SessionFirstToken(
                delta=piece, ttft_from_open_ms=self._since(self._job.arrived_s), ttft_from_finish_ms=ttft_ms
            )
            await self._write(api.StreamGenerateResponse(first_token=event))

    async def stop(self, *tasks: asyncio.Task[None]) -> None:
        """Cancels tasks that write events, none in the midst of one."""
        async with self._turn:
            for task in tasks:
                task.cancel()

    async def _write(self, response: api.StreamGenerateResponse) -> None:
        response.request_id = self._job.request_id
        async with self._turn:
            await calls.write(self._context, response, self._send_timeout_s)

    def _with_record(self, completion: generation.Completion) -> generation.Completion:
        if self._pieces.record is not None:
            completion.session.CopyFrom(self._pieces.record)
            completion.session.ttft_from_open_ms = self._since(self._job.arrived_s)
            completion.session.ttft_from_finish_ms = self._since(self._pieces.finished_s)
            self._metrics.session_ended(completion.session, self._job.lifecycle.trace)
        return completion

    def _since(self, started_s: float) -> float:
        """Milliseconds from then until the first token."""
        return (self._job.first_token_s - started_s) * 1000
