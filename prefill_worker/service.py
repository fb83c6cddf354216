"""The prefill worker's side of WorkerService: one engine job of one token for each prompt.

The first token goes to the client at once, so its text may be shown only when no later token can change it: not
while it is part of a character, and not while it may be the beginning of a stop string. What is held back here
comes with the decode worker's first delta.
"""

from contextlib import aclosing
from dataclasses import replace

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.wire import Context

from cluster_core.engine import EngineJob, EngineOutput, SamplingSpec
from worker_runtime import wire_conversion
from worker_runtime.service import WorkerServiceBase, answering

REPLACEMENT_CHARACTER = "�"


class PrefillService(WorkerServiceBase):
    async def Prefill(self, request: wire.PrefillRequest, context: Context) -> wire.PrefillResponse:
        async with answering(context):
            self._admit(request.generation)
            output = await self._first_output(prefill_job(request))
        return self._response(output, request)

    async def _first_output(self, job: EngineJob) -> EngineOutput:
        async with aclosing(self._engine.generate(job)) as outputs:  # type: ignore[type-var]
            output: EngineOutput
            async for output in outputs:
                if output.finish_reason is not None:
                    return output
        raise AssertionError("a job ends with a finish reason")

    def _response(self, output: EngineOutput, request: wire.PrefillRequest) -> wire.PrefillResponse:
        ended = output.lease is None
        first = wire_conversion.delta_to_wire(output)
        if not ended:
            first.text = presentable_text(output.text, has_stop_strings=bool(request.sampling.stop))
        response = wire.PrefillResponse(
            first=first,
            finish_reason=(
                wire_conversion.finish_to_wire(output.finish_reason) if ended else generation.FINISH_REASON_UNSPECIFIED
            ),
            cached_tokens=output.cached_tokens,
            engine_queue_ms=output.queue_ms,
            engine_prefill_ms=output.prefill_ms,
        )
        if output.lease is not None:
            name, number = self._registration.worker_id, self._registration.generation
            response.handoff.CopyFrom(wire_conversion.lease_to_wire(output.lease, name, number))
        return response


def prefill_job(request: wire.PrefillRequest) -> EngineJob:
    """The one-token job of a prefill request."""
    return EngineJob(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        sampling=first_token_sampling(wire_conversion.sampling_from_wire(request.sampling)),
        hand_off=request.hand_off,
    )


def first_token_sampling(sampling: SamplingSpec) -> SamplingSpec:
    """The same sampling for the first token alone."""
    return replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1))


def presentable_text(text: str, *, has_stop_strings: bool) -> str:
    """What of a first token's text can be shown before the second is known."""
    return "" if has_stop_strings or text.endswith(REPLACEMENT_CHARACTER) else text
