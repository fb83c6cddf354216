"""Traces as messages: one with its stages, events, and what came of the request; many, a line each."""

from collections.abc import Sequence
from itertools import islice

from rachis.v1 import admin_pb2 as admin

from control_plane.model.request_trace import RequestTrace
from control_plane.tracing.traces import Traces

# Of each, in one answer.
MOST_LISTED = 1000


def told(
    trace: RequestTrace, now_s: float, arrived_unix_s: float, decisions: Sequence[admin.PlacementDecision] = ()
) -> admin.GetTraceResponse:
    """now_s: on the trace's clock, where it still runs. decisions: of placement."""
    return admin.GetTraceResponse(
        request_id=trace.request_id,
        trace_id=f"{trace.trace_id:032x}",
        kind=trace.kind,
        outcome=trace.outcome,
        arrived_unix_s=arrived_unix_s,
        exported=trace.is_exported,
        answer=_answer(trace, now_s),
        further_choices=[_answer(choice, now_s) for choice in trace.choices],
        decisions=decisions,
    )


def _in_a_line(trace: RequestTrace, now_s: float) -> admin.RequestView:
    """now_s: on the trace's clock, where it still runs."""
    until_s, ttft_s, answered = now_s if trace.ended_s is None else trace.ended_s, trace.ttft_s, trace.answered
    mark = trace.marks[-1]
    return admin.RequestView(
        request_id=trace.request_id,
        kind=trace.kind,
        outcome=trace.outcome,
        tenant=trace.tenant,
        stage=mark.stage.value,
        stage_ms=(until_s - mark.began_s) * 1000,
        worker_id=mark.worker_id,
        age_ms=(until_s - trace.began_s) * 1000,
        ttft_ms=None if ttft_s is None else ttft_s * 1000,
        prompt_tokens=answered.prompt_tokens if answered is not None else 0,
        completion_tokens=answered.completion_tokens if answered is not None else 0,
        migrations=sum(each.migrations for each in (trace, *trace.choices)),
    )


def listed(traces: Traces, request: admin.ListRequestsRequest, tenant: str | None) -> admin.ListRequestsResponse:
    """tenant: whose requests may be told of; None: all."""
    now_s, running = traces.now_s(), traces.running(tenant)
    most_running, most_ended = min(request.running, MOST_LISTED), min(request.ended, MOST_LISTED)
    return admin.ListRequestsResponse(
        running=[_in_a_line(trace, now_s) for trace in running[:most_running]],
        ended=[_in_a_line(trace, now_s) for trace in islice(traces.ended(tenant), most_ended)],
        running_total=len(running),
    )


def not_known(name: str) -> str:
    """The sentence for a request that is not among those that are remembered."""
    if not name:
        return "this router has no trace yet"
    return (
        f"no trace of a request `{name[:48]}`: it never was at this router, or is among those that "
        "tracing.memory_mib has no room for any more"
    )


def _answer(trace: RequestTrace, now_s: float) -> admin.AnswerTrace:
    began_s, ttft_s, answered = trace.began_s, trace.ttft_s, trace.answered
    answer = admin.AnswerTrace(
        stages=[
            admin.TraceStage(
                name=each.stage.value,
                start_ms=(each.began_s - began_s) * 1000,
                duration_ms=(each.ended_s - each.began_s) * 1000,
                worker_id=each.worker_id,
                attempt=each.attempt,
                migrates=each.migrates,
            )
            for each in trace.intervals(now_s)
        ],
        events=[
            admin.TraceEvent(name=event.name, at_ms=(event.at_s - began_s) * 1000, detail=event.detail)
            for event in sorted(trace.events)
        ],
        end_to_end_ms=((now_s if trace.ended_s is None else trace.ended_s) - began_s) * 1000,
        ttft_ms=None if ttft_s is None else ttft_s * 1000,
    )
    if answered is not None:
        answer.prompt_tokens, answer.cached_tokens = answered.prompt_tokens, answered.cached_tokens
        answer.completion_tokens = answered.completion_tokens
        answer.route.CopyFrom(answered.route)
    return answer
