"""What an engine is given to compute and what comes of it: jobs, their outputs, and how far a session is.

Who holds the KV blocks of a request:
    prefill job, running             the engine
    prefill job, finished, leased    the engine, until pulled, released, or the lease ends
    decode job, handed over          likewise
    decode job with a lease          the leasing engine until the pull has landed, then this engine
    decode job, running              this engine

`worker_runtime.wire_table` says which of these types travels as which message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from cluster_core.clock import UnixMs

# What goes in.


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer's text has to be, by exactly one of these: as in `rachis.v1.StructuredOutputs`."""

    json: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How tokens are chosen; the meaning and the ranges are those of `rachis.v1.SamplingParams`."""

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True)
class KvLease:
    """The leased KV blocks of a prefilled prompt, pulled by the engine that decodes."""

    lease_id: str
    # What the transport needs, opaque.
    connector_params: bytes
    # No pull starts or ends after this.
    deadline_unix_ms: UnixMs


@dataclass(frozen=True, slots=True)
class EmittedTokens:
    """The beginning of an answer, which other engines have sampled: this engine generates on from it."""

    token_ids: tuple[int, ...]
    # Characters of its text that the client has already seen.
    sent_chars: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: weights beside the model's, and KV that is nobody else's."""

    name: str
    # Of a folder on the engine's host.
    path: str
    # Of what the folder holds: an engine knows the adapter, and names its KV, by this alone. Empty: not known yet.
    digest: str = ""


# Key in `SamplingParams.extra_args` of a request to vLLM: its `TenantShare`, where it is some tenant's.
TENANT_ARG = "rachis_tenant"


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Whose a job is, and its part of an engine while others want it as well."""

    # Empty: of nobody; a service without keys has no tenants.
    tenant_id: str = ""
    # 0 is as 1.
    weight: float = 1.0

    @property
    def part(self) -> float:
        """What its tokens are divided by."""
        return self.weight or 1.0


NOBODY = TenantShare()


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One prompt for the engine."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingSpec
    # When the job ends by length, its KV blocks stay leased and the last output carries the lease.
    hand_off: bool = False
    # Where the KV blocks of the prompt are found.
    pull: KvLease | None = None
    # The answer so far, to generate on from.
    emitted: EmittedTokens | None = None
    # Jobs share cached KV only with jobs of the same salt.
    cache_salt: str = ""
    # The lowest is computed first, and admitted to a decode batch first.
    priority: int = 0
    # Seconds from now that anybody waits for the job; None: nobody said.
    deadline_s: float | None = None
    # None: the model alone. It has to be held until the job has ended, see `Engine.holding`.
    adapter: Adapter | None = None
    # Of the span that the engine's own belongs below, as W3C Trace Context writes it; empty: of none.
    traceparent: str = ""
    tenant: TenantShare = field(default_factory=TenantShare)

    @property
    def kv_scope(self) -> str:
        """What besides its tokens its KV depends on: KV is shared within one scope only."""
        return kv_scope(self.cache_salt, self.adapter.digest if self.adapter is not None else "")


def kv_scope(cache_salt: str, adapter_digest: str) -> str:
    """A salt has printable characters alone, so that no two pairs are one scope."""
    return f"{cache_salt}\n{adapter_digest}" if adapter_digest else cache_salt


class SessionMode(Enum):
    """How the prompt of a session changes: it only grows, or is replaced as well."""

    APPEND = "append"
    UPDATE = "update"


# What comes out.


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


class HandoffOutcome(Enum):
    """How the prompt's KV got to the engine that decodes."""

    NONE = "none"
    PULLED = "pulled"
    LOCAL = "local"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What came of a pull."""

    outcome: HandoffOutcome = HandoffOutcome.NONE
    # What crossed.
    kv_bytes: int = 0
    pulled_tokens: int = 0
    # The wait for it included.
    transfer_ms: float = 0.0
    # Reads that it crossed by.
    kv_descriptors: int = 0


class SessionEventKind(Enum):
    """What can happen to a session; the meaning is that of `rachis.v1.SessionEventKind`."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    KV_ON_DEVICE = "kv_on_device"
    PREEMPTED_SWAP = "preempted_swap"
    PREEMPTED_RECOMPUTE = "preempted_recompute"
    RESUMED = "resumed"
    INVALIDATED = "invalidated"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SessionEvent:
    kind: SessionEventKind
    # Seconds since the session was opened in the engine.
    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """Where a session stands; the meaning is that of `rachis.v1.SessionProgress`."""

    received_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    invalidated_tokens: int = 0
    prompt_tokens: int = 0
    ready_tokens: int = 0
    inputs: int = 0


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What happened to a session; comes with its last output."""

    tokens: SessionProgress
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    events: tuple[SessionEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What is new of a job since its output before."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    # Of the first output of an answer alone, where nothing of it had been emitted before.
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    # Of the last output alone, as are the lease and the session's record.
    finish_reason: FinishReason | None = None
    # Of the first output alone, as are the three after it.
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff: HandoffReport | None = None
    lease: KvLease | None = None
    session: SessionRecord | None = None

    @property
    def is_last(self) -> bool:
        """Of a job that was handed over, the lease alone comes with it."""
        return self.finish_reason is not None or self.lease is not None

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but tokens and text."""
        return not (
            self.finish_reason
            or self.lease
            or self.session
            or self.logprobs
            or self.prompt_logprobs
            or self.handoff
            or self.cached_tokens
            or self.queue_ms
            or self.prefill_ms
        )
