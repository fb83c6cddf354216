"""Which type of the engine protocol travels as which message of `rachis.v1`: one literal table, carried out both ways
by `worker_runtime.wire_conversion`.

Fields of the same name carry each other, whole trees of them: a report inside a report travels by its own row. A row
names what is left: fields that are called differently, and fields of the message that come from somewhere else. Of two
names that end in `_s` and `_ms` the values are seconds and milliseconds.

`tests/pure/worker_runtime/test_wire_table.py` fails for a field on either side that no row carries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from google.protobuf.message import Message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import (
    Adapter,
    EmittedTokens,
    EngineJob,
    EngineOutput,
    FinishReason,
    HandoffOutcome,
    HandoffReport,
    KvLease,
    PositionLogprobs,
    SamplingSpec,
    SessionEvent,
    SessionEventKind,
    SessionMode,
    SessionProgress,
    SessionRecord,
    StructuredOutputs,
    TenantShare,
    TokenLogprob,
)
from cluster_core.engine_reports import (
    DecodeBatch,
    DecodeReport,
    EngineCosts,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    HotPrefix,
    PolicyRow,
    PrefixGroup,
    TierReport,
    WaitingRequest,
)
from cluster_core.versions import Versions


@dataclass(frozen=True, slots=True)
class Row:
    ours: type
    message: type[Message]
    # Our field and the message's, where they are not called the same.
    pairs: Mapping[str, str] = field(default_factory=dict)
    # Fields of the message that do not come from ours, even where one is called the same; the caller has them.
    given: frozenset[str] = frozenset()


ROWS = (
    # What an engine is given.
    Row(SamplingSpec, generation.SamplingParams),
    Row(StructuredOutputs, generation.StructuredOutputs),
    Row(KvLease, wire.KvHandoff, given=frozenset({"worker_id", "generation"})),
    Row(EmittedTokens, wire.EmittedTokens),
    Row(Adapter, wire.Adapter),
    Row(TenantShare, wire.TenantShare),
    Row(EngineJob, wire.PrefillRequest, given=frozenset({"generation", "named"})),
    Row(EngineJob, wire.PrefillSessionOpen, given=frozenset({"generation", "mode", "named"})),
    Row(
        EngineJob,
        wire.DecodeRequest,
        pairs={"pull": "handoff"},
        given=frozenset({"generation", "output_stream", "output_call", "named"}),
    ),
    # What comes of it.
    Row(TokenLogprob, generation.TokenLogprob),
    Row(PositionLogprobs, generation.PositionLogprobs),
    # Whose answer it is the router knows.
    Row(EngineOutput, generation.CompletionDelta, given=frozenset({"adapter"})),
    Row(
        EngineOutput,
        wire.PrefillResponse,
        pairs={"queue_ms": "engine_queue_ms", "prefill_ms": "engine_prefill_ms"},
        # A prefill that is handed on may not show all of its text yet; its lease names the worker on the wire.
        given=frozenset({"first", "handoff"}),
    ),
    Row(
        HandoffReport,
        wire.DecodeStarted,
        pairs={"outcome": "handoff"},
        given=frozenset({"cached_tokens", "engine_queue_ms", "engine_prefill_ms"}),
    ),
    Row(EngineOutput, wire.DecodeEnd, given=frozenset({"completion_tokens", "delta"})),
    Row(SessionProgress, generation.SessionProgress),
    Row(SessionEvent, generation.SessionEvent, pairs={"at_s": "at_ms"}),
    # The router knows when the client has opened and finished the session.
    Row(SessionRecord, generation.SessionRecord, given=frozenset({"ttft_from_open_ms", "ttft_from_finish_ms"})),
    # What an engine says of itself.
    Row(EngineInfo, wire.ModelInfo, pairs={"model": "name"}),
    Row(EngineStatus, wire.GetWorkerStatusResponse, given=frozenset({"registration", "hottest", "batch"})),
    Row(EngineLoad, wire.WorkerLoad, given=frozenset({"active_calls"})),
    Row(
        EngineCounters,
        wire.WorkerCounters,
        given=frozenset({"resident_bytes", "node_memory_bytes", "node_available_bytes", "log_lines_lost"}),
    ),
    Row(EngineCosts, wire.WorkerCosts),
    Row(TierReport, wire.TierReport),
    Row(HotPrefix, wire.HotPrefix),
    Row(DecodeReport, wire.DecodeReport),
    Row(PrefixGroup, wire.PrefixGroup),
    Row(WaitingRequest, wire.WaitingRequest),
    Row(PolicyRow, wire.PolicyRow),
    Row(DecodeBatch, wire.DecodeBatch),
    Row(Versions, wire.Versions),
)

# The unspecified value of each stands for None.
ENUMS: Mapping[type[Enum], Mapping[Any, int]] = {
    FinishReason: {
        FinishReason.STOP: generation.FINISH_REASON_STOP,
        FinishReason.LENGTH: generation.FINISH_REASON_LENGTH,
    },
    HandoffOutcome: {
        HandoffOutcome.NONE: generation.HANDOFF_OUTCOME_NONE,
        HandoffOutcome.PULLED: generation.HANDOFF_OUTCOME_PULLED,
        HandoffOutcome.LOCAL: generation.HANDOFF_OUTCOME_LOCAL,
        HandoffOutcome.RECOMPUTED: generation.HANDOFF_OUTCOME_RECOMPUTED,
    },
    SessionMode: {
        SessionMode.APPEND: generation.SESSION_MODE_APPEND,
        SessionMode.UPDATE: generation.SESSION_MODE_UPDATE,
    },
    SessionEventKind: {
        SessionEventKind.QUEUED: generation.SESSION_EVENT_KIND_QUEUED,
        SessionEventKind.SCHEDULED: generation.SESSION_EVENT_KIND_SCHEDULED,
        SessionEventKind.KV_ON_DEVICE: generation.SESSION_EVENT_KIND_KV_ON_DEVICE,
        SessionEventKind.PREEMPTED_SWAP: generation.SESSION_EVENT_KIND_PREEMPTED_SWAP,
        SessionEventKind.PREEMPTED_RECOMPUTE: generation.SESSION_EVENT_KIND_PREEMPTED_RECOMPUTE,
        SessionEventKind.RESUMED: generation.SESSION_EVENT_KIND_RESUMED,
        SessionEventKind.INVALIDATED: generation.SESSION_EVENT_KIND_INVALIDATED,
        SessionEventKind.FINISHED: generation.SESSION_EVENT_KIND_FINISHED,
    },
}
