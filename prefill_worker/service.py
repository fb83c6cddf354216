"""The prefill worker's side of WorkerService: one engine job or session of one token for each prompt.

The first token goes to the client at once, so its text may be shown only when no later token can change it: not
while it is part of a character, and not while it may be the beginning of a stop string. What is held back here
comes with the decode worker's first delta.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from dataclasses import replace

from rachis import conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine import Engine
from cluster_core.engine_jobs import EngineJob, EngineOutput, SamplingSpec, SessionMode
from cluster_core.errors import InvalidInputError
from cluster_core.log_files import ReadLogs
from cluster_wire import calls
from cluster_wire.calls import Context
from prefill_worker.session_stream import SessionStream
from worker_runtime.claim_feed import ClaimAudit
from worker_runtime.own_logs import no_logs
from worker_runtime.service import WorkerServiceBase, answering
from worker_runtime.wire_conversion import from_wire, session_mode_from_wire, to_wire

REPLACEMENT_CHARACTER = "�"
DEFAULT_PROGRESS_INTERVAL_MS = 50


class PrefillService(WorkerServiceBase):
    """`progress_interval_ms`: least time between two progress messages of a session."""

    def __init__(
        self,
        engine: Engine,
        registration: wire.WorkerRegistration,
        on_state: Callable[[], None],
        claim_feed: ClaimAudit | None = None,
        *,
        progress_interval_ms: int = DEFAULT_PROGRESS_INTERVAL_MS,
        logs: ReadLogs = no_logs,
    ) -> None:
        super().__init__(engine, registration, on_state, claim_feed, logs=logs)
        self._progress_interval_s = progress_interval_ms / 1000

    async def Prefill(self, request: wire.PrefillRequest, context: Context) -> wire.PrefillResponse:
        async with answering(context):
            with self._taken(request):
                job = prefill_job(request)
                async with self._holding(job):
                    output = await self._first_output(job)
        return self._response(output, request)

    async def PrefillSession(  # type: ignore[override]  # it reads and writes through the context
        self, request_iterator: AsyncIterator[wire.PrefillSessionRequest], context: Context
    ) -> None:
        async with answering(context):
            request = await conventions.next_message(context)
            if request is None or not request.HasField("open"):
                raise InvalidInputError("the first message must be `open`", field="event")
            opened: wire.PrefillSessionOpen = request.open
            with self._taken(opened):
                mode, job = session_mode_from_wire(opened.mode), prefill_job(opened)
                async with self._holding(job):
                    output = await self._session_output(job, mode, context)
            await calls.write(context, wire.PrefillSessionResponse(prefilled=self._response(output, opened)))

    async def _session_output(self, job: EngineJob, mode: SessionMode, context: Context) -> EngineOutput:
        interval_s, moves = self._progress_interval_s, self._sessions_move
        await calls.begin(context)
        with closing(self._engine.open_session(job, mode)) as session:
            return await SessionStream(session, mode, context, interval_s, list(job.token_ids), moves).run()

    async def _first_output(self, job: EngineJob) -> EngineOutput:
        async with aclosing(self._engine.generate(job)) as outputs:  # type: ignore[type-var]
            output: EngineOutput
            async for output in outputs:
                if output.finish_reason is not None:
                    return output
        raise AssertionError("a job ends with a finish reason")

    def _response(
        self, output: EngineOutput, request: wire.PrefillRequest | wire.PrefillSessionOpen
    ) -> wire.PrefillResponse:
        first = to_wire(output, generation.CompletionDelta)
        if output.lease is None:
            return to_wire(output, wire.PrefillResponse, first=first)
        first.text = presentable_text(output.text, has_stop_strings=bool(request.sampling.stop))
        return to_wire(
            output,
            wire.PrefillResponse,
            first=first,
            handoff=self._handoff(output.lease),
            # The decode worker ends it.
            finish_reason=generation.FINISH_REASON_UNSPECIFIED,
        )


def prefill_job(request: wire.PrefillRequest | wire.PrefillSessionOpen) -> EngineJob:
    """The one-token job of a prefill request or of a session."""
    job = from_wire(request, EngineJob, traceparent=request.named.traceparent)
    return replace(job, sampling=next_token_sampling(job.sampling, len(job.emitted.token_ids) if job.emitted else 0))


def next_token_sampling(sampling: SamplingSpec, emitted: int = 0) -> SamplingSpec:
    """The same sampling for one token alone, after so many."""
    return replace(sampling, max_tokens=emitted + 1, min_tokens=min(sampling.min_tokens, emitted + 1))


def presentable_text(text: str, *, has_stop_strings: bool) -> str:
    """What of a first token's text can be shown before the second is known."""
    return "" if has_stop_strings or text.endswith(REPLACEMENT_CHARACTER) else text
