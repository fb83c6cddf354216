"""The decode worker's side of WorkerService: pulls a prompt's KV, generates on from what has been emitted, streams.

What a call produces goes through its router's output stream (`output_streams`), or, for whoever names none, comes on
the call itself. An answer that leaves the worker takes its KV along: `HandOver` leases it, and its call ends with that.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

from rachis import conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine import Engine
from cluster_core.engine_jobs import EngineJob, EngineOutput, HandoffReport, KvLease
from cluster_core.errors import InvalidInputError
from cluster_core.log_files import ReadLogs
from cluster_wire import calls
from cluster_wire.calls import Context
from decode_worker.output_streams import OutputStream, OutputStreams
from worker_runtime.claim_feed import ClaimAudit
from worker_runtime.own_logs import no_logs
from worker_runtime.service import WorkerServiceBase, answering
from worker_runtime.wire_conversion import from_wire, to_wire


class DecodeService(WorkerServiceBase):
    def __init__(
        self,
        engine: Engine,
        registration: wire.WorkerRegistration,
        on_state: Callable[[], None],
        claim_feed: ClaimAudit | None = None,
        *,
        logs: ReadLogs = no_logs,
    ) -> None:
        super().__init__(engine, registration, on_state, claim_feed, logs=logs)
        self._outputs = OutputStreams()

    async def Decode(self, request: wire.DecodeRequest, context: Context) -> AsyncIterator[wire.DecodeResponse]:
        async with answering(context):
            with self._taken(request):
                stream = self._outputs.of(request.output_stream) if request.output_stream else None
                job = decode_job(request, context.time_remaining())
                answer = _Answer(job, self._handoff)
                async with self._holding(job), aclosing(self._engine.generate(job)) as outputs:  # type: ignore[type-var]
                    output: EngineOutput
                    async for output in outputs:
                        if stream is not None and answer.only_adds(output):
                            stream.put_tokens(request.output_call, output.token_ids, output.text)
                            continue
                        for response in answer.responses(output):
                            if stream is not None:
                                stream.put(request.output_call, response)
                            else:
                                yield response

    async def StreamOutputs(  # type: ignore[override]  # it reads and writes through the context
        self, request_iterator: AsyncIterator[wire.StreamOutputsRequest], context: Context
    ) -> None:
        async with answering(context):
            opening = await conventions.next_message(context)
            if opening is None:
                raise InvalidInputError("must be opened", field="stream_id")
            self._fence(opening.generation)
            with self._outputs.opened(opening.stream_id) as stream:
                self._look_whether_drained()
                reading = asyncio.create_task(_read_taken(context, stream))
                try:
                    async with aclosing(stream.messages()) as messages:  # type: ignore[type-var]
                        async for message in messages:
                            await calls.write(context, message)
                finally:
                    reading.cancel()

    async def HandOver(self, request: wire.HandOverRequest, context: Context) -> wire.HandOverResponse:
        async with answering(context):
            self._fence(request.generation)
            return wire.HandOverResponse(handed_over=await self._engine.hand_over(request.request_id))

    @property
    def active_calls(self) -> int:
        return max(super().active_calls, self._outputs.busy_streams)

    def _on_drained(self) -> None:
        self._outputs.end()


class _Answer:
    """What an engine makes of one job, as messages: started, deltas, and how it ends."""

    def __init__(self, job: EngineJob, handoff: Callable[[KvLease], wire.KvHandoff]) -> None:
        self._generated = 0 if job.emitted is None else len(job.emitted.token_ids)
        self._handoff = handoff
        self._has_begun = False

    def only_adds(self, output: EngineOutput) -> bool:
        """It is tokens and text alone, which count as told then."""
        is_more = output.is_last or output.logprobs or output.prompt_logprobs
        if is_more or not self._has_begun or not (output.token_ids or output.text):
            return False
        self._generated += len(output.token_ids)
        return True

    def responses(self, output: EngineOutput) -> Iterator[wire.DecodeResponse]:
        if not self._has_begun:
            self._has_begun = True
            yield wire.DecodeResponse(started=_started(output))
        if output.lease is not None:
            yield wire.DecodeResponse(handed_over=self._handoff(output.lease))
            return
        self._generated += len(output.token_ids)
        piece = to_wire(output, generation.CompletionDelta)
        if output.finish_reason is not None:
            end = to_wire(output, wire.DecodeEnd, completion_tokens=self._generated, delta=piece)
            yield wire.DecodeResponse(end=end)
        elif output.token_ids or output.text:
            yield wire.DecodeResponse(delta=piece)


async def _read_taken(context: Context, stream: OutputStream) -> None:
    """Until the router leaves, which cancels the call; one that says no more is gone as well."""
    while await conventions.next_message(context) is not None:
        stream.taken()
    stream.leave()


def decode_job(request: wire.DecodeRequest, deadline_s: float | None = None) -> EngineJob:
    """The engine job of a decode request, with or without a hand-off. deadline_s: how long the call still waits."""
    return from_wire(request, EngineJob, deadline_s=deadline_s, traceparent=request.named.traceparent)


def _started(output: EngineOutput) -> wire.DecodeStarted:
    return to_wire(
        output.handoff or HandoffReport(),
        wire.DecodeStarted,
        cached_tokens=output.cached_tokens,
        engine_queue_ms=output.queue_ms,
        engine_prefill_ms=output.prefill_ms,
    )
