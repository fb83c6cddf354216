"""The decode worker's side of WorkerService: pulls a prompt's KV, generates on from what has been emitted, streams.

An answer that leaves the worker takes its KV along: `HandOver` leases it, and the stream ends with the lease.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import EngineJob, EngineOutput, HandoffReport
from cluster_wire.calls import Context
from worker_runtime.service import WorkerServiceBase, answering
from worker_runtime.wire_conversion import from_wire, to_wire


class DecodeService(WorkerServiceBase):
    async def Decode(self, request: wire.DecodeRequest, context: Context) -> AsyncIterator[wire.DecodeResponse]:
        async with answering(context):
            with self._taken(request.generation):
                job = decode_job(request, context.time_remaining())
                generated = 0 if job.emitted is None else len(job.emitted.token_ids)
                started = False
                async with self._holding(job), aclosing(self._engine.generate(job)) as outputs:  # type: ignore[type-var]
                    output: EngineOutput
                    async for output in outputs:
                        if not started:
                            started = True
                            yield wire.DecodeResponse(started=_started(output))
                        if output.lease is not None:
                            yield wire.DecodeResponse(handed_over=self._handoff(output.lease))
                            return
                        generated += len(output.token_ids)
                        piece = to_wire(output, generation.CompletionDelta)
                        if output.finish_reason is not None:
                            end = to_wire(output, wire.DecodeEnd, completion_tokens=generated, delta=piece)
                            yield wire.DecodeResponse(end=end)
                        elif output.token_ids or output.text:
                            yield wire.DecodeResponse(delta=piece)

    async def HandOver(self, request: wire.HandOverRequest, context: Context) -> wire.HandOverResponse:
        async with answering(context):
            self._fence(request.generation)
            return wire.HandOverResponse(handed_over=await self._engine.hand_over(request.request_id))


def decode_job(request: wire.DecodeRequest, deadline_s: float | None = None) -> EngineJob:
    """The engine job of a decode request, with or without a hand-off. deadline_s: how long the call still waits."""
    return from_wire(request, EngineJob, deadline_s=deadline_s)


def _started(output: EngineOutput) -> wire.DecodeStarted:
    return to_wire(output.handoff or HandoffReport(), wire.DecodeStarted, cached_tokens=output.cached_tokens)
