"""Between the wire messages of `rachis.v1` and the engine protocol's types."""

from collections.abc import Iterable
from dataclasses import asdict

import numpy as np
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import (
    EngineOutput,
    FinishReason,
    HandoffOutcome,
    KvLease,
    PositionLogprobs,
    SamplingSpec,
    SessionEventKind,
    SessionMode,
    SessionProgress,
    SessionRecord,
    TokenLogprob,
)
from cluster_core.engine_reports import (
    DecodeBatch,
    DecodeReport,
    EngineCosts,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    HotPrefix,
    PrefixClaims,
    TierReport,
)
from cluster_core.errors import InvalidInputError
from cluster_core.versions import Versions

FINISH_REASONS = {
    FinishReason.STOP: generation.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation.FINISH_REASON_LENGTH,
}
HANDOFF_OUTCOMES = {
    HandoffOutcome.NONE: generation.HANDOFF_OUTCOME_NONE,
    HandoffOutcome.PULLED: generation.HANDOFF_OUTCOME_PULLED,
    HandoffOutcome.LOCAL: generation.HANDOFF_OUTCOME_LOCAL,
    HandoffOutcome.RECOMPUTED: generation.HANDOFF_OUTCOME_RECOMPUTED,
}
SESSION_MODES = {
    generation.SESSION_MODE_APPEND: SessionMode.APPEND,
    generation.SESSION_MODE_UPDATE: SessionMode.UPDATE,
}
SESSION_EVENT_KINDS = {
    SessionEventKind.QUEUED: generation.SESSION_EVENT_KIND_QUEUED,
    SessionEventKind.SCHEDULED: generation.SESSION_EVENT_KIND_SCHEDULED,
    SessionEventKind.KV_ON_DEVICE: generation.SESSION_EVENT_KIND_KV_ON_DEVICE,
    SessionEventKind.PREEMPTED_SWAP: generation.SESSION_EVENT_KIND_PREEMPTED_SWAP,
    SessionEventKind.PREEMPTED_RECOMPUTE: generation.SESSION_EVENT_KIND_PREEMPTED_RECOMPUTE,
    SessionEventKind.RESUMED: generation.SESSION_EVENT_KIND_RESUMED,
    SessionEventKind.INVALIDATED: generation.SESSION_EVENT_KIND_INVALIDATED,
    SessionEventKind.FINISHED: generation.SESSION_EVENT_KIND_FINISHED,
}
_OPTIONAL_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "min_tokens",
    "ignore_eos",
)


def sampling_from_wire(message: generation.SamplingParams) -> SamplingSpec:
    """What the message sets; the protocol's defaults for the rest."""
    given = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}  # type: ignore[arg-type]
    return SamplingSpec(stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids), **given)


def delta_to_wire(output: EngineOutput) -> generation.CompletionDelta:
    return generation.CompletionDelta(
        token_ids=output.token_ids, text=output.text, logprobs=[_position(row) for row in output.logprobs]
    )


def finish_to_wire(reason: FinishReason | None) -> generation.FinishReason.ValueType:
    return generation.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def lease_to_wire(lease: KvLease, worker_id: str, generation_number: int) -> wire.KvHandoff:
    return wire.KvHandoff(
        lease_id=lease.lease_id,
        prefill_worker_id=worker_id,
        prefill_generation=generation_number,
        connector_params=lease.connector_params,
        deadline_unix_ms=lease.deadline_unix_ms,
    )


def lease_from_wire(handoff: wire.KvHandoff) -> KvLease:
    return KvLease(handoff.lease_id, handoff.connector_params, UnixMs(handoff.deadline_unix_ms))


def session_mode_from_wire(mode: generation.SessionMode.ValueType) -> SessionMode:
    """Raises InvalidInputError for a mode that is none."""
    if mode not in SESSION_MODES:
        raise InvalidInputError("must be APPEND or UPDATE", field="open.mode")
    return SESSION_MODES[mode]


def progress_to_wire(progress: SessionProgress) -> generation.SessionProgress:
    return generation.SessionProgress(**asdict(progress))


def record_to_wire(record: SessionRecord) -> generation.SessionRecord:
    events = [
        generation.SessionEvent(kind=SESSION_EVENT_KINDS[event.kind], at_ms=event.at_s * 1000, tokens=event.tokens)
        for event in record.events
    ]
    return generation.SessionRecord(
        tokens=progress_to_wire(record.tokens),
        preemptions_swap=record.preemptions_swap,
        preemptions_recompute=record.preemptions_recompute,
        events=events,
    )


def model_to_wire(info: EngineInfo) -> wire.ModelInfo:
    return wire.ModelInfo(
        name=info.model,
        tokenizer=info.tokenizer,
        vocabulary_size=info.vocabulary_size,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
    )


def load_to_wire(load: EngineLoad) -> wire.WorkerLoad:
    return wire.WorkerLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        leased_handoffs=load.leased_handoffs,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        open_sessions=load.open_sessions,
        free_host_blocks=load.free_host_blocks,
        total_host_blocks=load.total_host_blocks,
    )


def counters_to_wire(counters: EngineCounters, resident_bytes: int) -> wire.WorkerCounters:
    return wire.WorkerCounters(
        requests=counters.requests,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        handoffs_leased=counters.handoffs_leased,
        handoffs_pulled=counters.handoffs_pulled,
        handoffs_recomputed=counters.handoffs_recomputed,
        handoffs_expired=counters.handoffs_expired,
        handoffs_released=counters.handoffs_released,
        kv_bytes_pulled=counters.kv_bytes_pulled,
        resident_bytes=resident_bytes,
    )


def costs_to_wire(costs: EngineCosts) -> wire.WorkerCosts:
    return wire.WorkerCosts(**asdict(costs))


def claims_to_wire(generation_number: int, sequence: int, claims: PrefixClaims) -> wire.GetPrefixClaimsResponse:
    return wire.GetPrefixClaimsResponse(
        generation=generation_number,
        sequence=sequence,
        device=np.fromiter(claims.device, dtype="<u8").tobytes(),
        host=np.fromiter(claims.host, dtype="<u8").tobytes(),
    )


def tiers_to_wire(report: TierReport) -> wire.TierReport:
    return wire.TierReport(**asdict(report))


def hottest_to_wire(prefixes: Iterable[HotPrefix]) -> wire.HottestPrefixes:
    return wire.HottestPrefixes(prefixes=[wire.HotPrefix(**asdict(each)) for each in prefixes])


def decode_to_wire(report: DecodeReport) -> wire.DecodeReport:
    return wire.DecodeReport(**asdict(report))


def batch_to_wire(batch: DecodeBatch) -> wire.DecodeBatch:
    return wire.DecodeBatch(
        groups=[wire.PrefixGroup(**asdict(each)) for each in batch.groups],
        waiting=[wire.WaitingRequest(**asdict(each)) for each in batch.waiting],
        table=[wire.PolicyRow(**asdict(each)) for each in batch.table],
        longest_wait_s=batch.longest_wait_s,
    )


def versions_to_wire(versions: Versions) -> wire.Versions:
    return wire.Versions(**asdict(versions))


def _position(row: PositionLogprobs) -> generation.PositionLogprobs:
    return generation.PositionLogprobs(sampled=_logprob(row.sampled), top=[_logprob(entry) for entry in row.top])


def _logprob(entry: TokenLogprob) -> generation.TokenLogprob:
    return generation.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)
