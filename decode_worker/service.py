"""The decode worker's side of WorkerService: pulls a prompt's KV, generates on from its first token, streams."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from rachis.v1 import worker_pb2 as wire
from rachis.wire import Context

from cluster_core.engine_jobs import EngineJob, EngineOutput, FirstToken, HandoffReport
from worker_runtime import wire_conversion
from worker_runtime.service import WorkerServiceBase, answering


class DecodeService(WorkerServiceBase):
    async def Decode(self, request: wire.DecodeRequest, context: Context) -> AsyncIterator[wire.DecodeResponse]:
        async with answering(context):
            with self._taken(request.generation):
                job = decode_job(request, context.time_remaining())
                generated = 0 if job.first is None else 1
                started = False
                async with aclosing(self._engine.generate(job)) as outputs:  # type: ignore[type-var]
                    output: EngineOutput
                    async for output in outputs:
                        if not started:
                            started = True
                            yield wire.DecodeResponse(started=_started(output))
                        generated += len(output.token_ids)
                        if output.token_ids or output.text:
                            yield wire.DecodeResponse(delta=wire_conversion.delta_to_wire(output))
                        if output.finish_reason is not None:
                            yield wire.DecodeResponse(end=_end(output, generated))


def decode_job(request: wire.DecodeRequest, deadline_s: float | None = None) -> EngineJob:
    """The engine job of a decode request, with or without a hand-off. deadline_s: how long the call still waits."""
    first = None
    if request.HasField("first"):
        first = FirstToken(request.first.token_id, request.first.sent_text)
    return EngineJob(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        sampling=wire_conversion.sampling_from_wire(request.sampling),
        pull=wire_conversion.lease_from_wire(request.handoff) if request.HasField("handoff") else None,
        first=first,
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline_s=deadline_s,
    )


def _started(output: EngineOutput) -> wire.DecodeStarted:
    report = output.handoff or HandoffReport()
    return wire.DecodeStarted(
        handoff=wire_conversion.HANDOFF_OUTCOMES[report.outcome],
        kv_bytes=report.kv_bytes,
        pulled_tokens=report.pulled_tokens,
        transfer_ms=report.transfer_ms,
        cached_tokens=output.cached_tokens,
    )


def _end(output: EngineOutput, generated: int) -> wire.DecodeEnd:
    return wire.DecodeEnd(
        finish_reason=wire_conversion.finish_to_wire(output.finish_reason), completion_tokens=generated
    )
