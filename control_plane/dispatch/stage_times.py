"""What workers say of their own time, put into a request's trace: it divides the calls that the router sees. Pure."""

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.model.request_trace import RequestTrace, TraceStage

# Of the events of one session's record.
_MOST_EVENTS = 64
_PULLED = frozenset({generation.HANDOFF_OUTCOME_PULLED, generation.HANDOFF_OUTCOME_LOCAL})


def note_prefill(trace: RequestTrace, response: wire.PrefillResponse, now_s: float) -> None:
    """The first token has come."""
    began_s = trace.marks[-1].began_s if trace.marks else now_s
    trace.divide(
        now_s,
        (TraceStage.PREFILL_QUEUE, response.engine_queue_ms / 1000),
        (TraceStage.PREFILL_COMPUTE, response.engine_prefill_ms / 1000),
    )
    if response.HasField("session"):
        _note_session(trace, response.session, began_s, now_s)
    trace.has_token(now_s)
    trace.enter(TraceStage.FIRST_TOKEN, now_s)


def note_decode(trace: RequestTrace, started: wire.DecodeStarted, now_s: float) -> None:
    """The decode worker has generated something. What it waited for KV is part of what it waited for its place."""
    pull_s = started.transfer_ms / 1000
    first_step = TraceStage.DECODE if started.handoff in _PULLED else TraceStage.PREFILL_COMPUTE
    trace.divide(
        now_s,
        (TraceStage.PULL, pull_s),
        (TraceStage.DECODE_QUEUE, started.engine_queue_ms / 1000 - pull_s),
        (first_step, started.engine_prefill_ms / 1000),
    )
    trace.has_token(now_s)
    trace.enter(TraceStage.DECODE, now_s, trace.marks[-1].worker_id if trace.marks else "")


def _note_session(trace: RequestTrace, record: generation.SessionRecord, began_s: float, now_s: float) -> None:
    """Its events have the engine's own clock; of what the session was before it came to this worker nothing is told."""
    tokens = record.tokens
    opened_s = _opened_s(trace, began_s)
    for event in record.events[:_MOST_EVENTS]:
        name = generation.SessionEventKind.Name(event.kind).removeprefix("SESSION_EVENT_KIND_").lower()
        trace.happened(min(opened_s + event.at_ms / 1000, now_s), f"session_{name}", f"{event.tokens} tokens")
    trace.happened(
        now_s,
        "session_tokens",
        f"{tokens.inputs} inputs, {tokens.received_tokens} received, {tokens.computed_tokens} computed, "
        f"{tokens.reused_tokens} reused, {tokens.invalidated_tokens} invalidated; "
        f"preempted {record.preemptions_swap} by swap, {record.preemptions_recompute} by recompute",
    )


def _opened_s(trace: RequestTrace, began_s: float) -> float:
    """When the session was opened at this worker: its input stage, where it has one."""
    return next((mark.began_s for mark in reversed(trace.marks) if mark.stage is TraceStage.INPUT), began_s)
