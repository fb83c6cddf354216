"""The engine protocol: what a worker asks of the thing that computes tokens.

Implementations: `worker_runtime.vllm_engine.VllmEngine` and, for tests and the simulator, a deterministic fake.
Both pass the contract tests in `tests/contract/`.

Who holds the KV blocks of a request:
    prefill job, running             the engine
    prefill job, finished, leased    the engine, until pulled, released, or the lease ends
    decode job with a lease          the leasing engine until the pull has landed, then this engine
    decode job, running              this engine
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from cluster_core.clock import UnixMs


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class HandoffOutcome(Enum):
    """How the prompt's KV got to the engine that decodes."""

    NONE = "none"
    PULLED = "pulled"
    LOCAL = "local"
    RECOMPUTED = "recomputed"


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
    min_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class KvLease:
    """The leased KV blocks of a prefilled prompt, pulled by the engine that decodes.

    connector_params: what the transport needs, opaque. deadline_unix_ms: no pull starts or ends after this.
    """

    lease_id: str
    connector_params: bytes
    deadline_unix_ms: UnixMs


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A first token that the prefill worker sampled: this engine generates on from it.

    sent_text: what of its text the client has already seen.
    """

    token_id: int
    sent_text: str


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One prompt for the engine.

    hand_off: when the job ends by length, its KV blocks stay leased and the last output carries the lease.
    pull: where the KV blocks of the prompt are found. first: a first token to generate on from. cache_salt: jobs share
    cached KV only with jobs of the same. priority: a decode engine admits the lowest first. deadline_s: seconds from
    now that anybody waits for the job; None: nobody said.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingSpec
    hand_off: bool = False
    pull: KvLease | None = None
    first: FirstToken | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What came of a pull. kv_bytes and pulled_tokens count what crossed; transfer_ms includes the wait for it."""

    outcome: HandoffOutcome = HandoffOutcome.NONE
    kv_bytes: int = 0
    pulled_tokens: int = 0
    transfer_ms: float = 0.0


class SessionMode(Enum):
    """How the prompt of a session changes: it only grows, or is replaced as well."""

    APPEND = "append"
    UPDATE = "update"


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
    """at_s: seconds since the session was opened in the engine."""

    kind: SessionEventKind
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
    """What happened to a session, told with its last output."""

    tokens: SessionProgress
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    events: tuple[SessionEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What is new of a job since its output before.

    handoff, cached_tokens, queue_ms and prefill_ms belong to the first output of a job; lease and session to the
    last.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff: HandoffReport | None = None
    lease: KvLease | None = None
    session: SessionRecord | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    model: str
    tokenizer: str
    vocabulary_size: int
    max_model_len: int
    block_size_tokens: int
    max_running_requests: int
    dtype: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running_requests: int = 0
    waiting_requests: int = 0
    leased_handoffs: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    open_sessions: int = 0
    free_host_blocks: int = 0
    total_host_blocks: int = 0


@dataclass(slots=True)
class EngineCounters:
    """Counts since the engine started; written by the engine alone.

    cacheable_requests, stored_blocks: the meaning is that of `rachis.v1.WorkerRegistration`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    handoffs_leased: int = 0
    handoffs_pulled: int = 0
    handoffs_recomputed: int = 0
    handoffs_expired: int = 0
    handoffs_released: int = 0
    kv_bytes_pulled: int = 0
    cacheable_requests: int = 0
    stored_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What work costs in this engine, measured while it runs; the meaning is that of `rachis.v1.WorkerCosts`.

    0: not measured yet.
    """

    prefill_s_per_token: float = 0.0
    load_s_per_token: float = 0.0
    decode_step_s: float = 0.0
    pull_s: float = 0.0
    pull_s_per_token: float = 0.0
    prefill_s: float = 0.0
    prefill_s_per_pair: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixClaims:
    """Chunks of prefixes that lie on the device and in host memory, by the keys of `prefix_chunks`."""

    device: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PrefixClaimChange:
    """Chunks that have come to a tier (true) or left it (false), by key; what is not named has not changed."""

    device: Mapping[int, bool] = field(default_factory=dict)
    host: Mapping[int, bool] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.device) + len(self.host)


@dataclass(frozen=True, slots=True)
class TierReport:
    """The two tiers of an engine's cached prefixes, device and host memory; the meaning is that of
    `rachis.v1.TierReport`.

    Counts since the engine started; `_blocks` in blocks, `_s` in seconds. refused_offers: by reason.
    """

    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    device_blocks: int
    device_capacity_blocks: int
    host_blocks: int
    host_capacity_blocks: int
    copied_out_blocks: int
    copied_out_bytes: int
    copy_out_s: float
    copied_back_blocks: int
    copied_back_bytes: int
    copy_back_s: float
    failed_copy_blocks: int
    refused_offers: Mapping[str, int]
    promoted_blocks: int
    promoted_used_blocks: int
    promoted_wasted_blocks: int
    evicted_device_blocks: int
    evicted_host_blocks: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A cached prefix; the meaning is that of `rachis.v1.HotPrefix`. tokens: how long it is."""

    hash: str
    tokens: int
    device_blocks: int
    host_blocks: int
    frequency: int
    priority: float


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """How a decode engine forms its batch; the meaning is that of `rachis.v1.DecodeReport`.

    Now: policy, mode, running_requests, loading_requests, tip_tokens, working_set_tokens, and waiting by cause. All
    else since the engine started: wait_s by cause, admissions by reason. `_sum` adds up over steps.
    """

    policy: str
    mode: str
    running_requests: int
    loading_requests: int
    tip_tokens: int
    working_set_tokens: int
    waiting: Mapping[str, int]
    steps: int
    batch_sum: int
    shared_tokens_sum: int
    admissions: Mapping[str, int]
    lost_tokens: int
    wait_s: Mapping[str, float]
    longest_held_s: float
    decisions: int
    decision_s: float
    probes: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests that share a prefix; the meaning is that of `rachis.v1.PrefixGroup`. tokens: how long it is."""

    hash: str
    tokens: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """The meaning is that of `rachis.v1.WaitingRequest`. shared_tokens: of its prompt, with the batch."""

    request_id: str
    prompt_tokens: int
    waited_s: float
    cause: str
    shared_tokens: int
    priority: int


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What a stop policy has learned in one state; the meaning is that of `rachis.v1.PolicyRow`.

    batch, loss, peers: the bins of the state, for people. A value is None where the action was never taken.
    """

    batch: str
    loss: str
    peers: str
    adds: int
    stops: int
    add_value: float | None
    stop_value: float | None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The batch in detail. groups: largest first. waiting: in the order of arrival. longest_wait_s: of those that wait
    now, by cause. table: empty for a policy that does not learn."""

    groups: tuple[PrefixGroup, ...] = ()
    waiting: tuple[WaitingRequest, ...] = ()
    table: tuple[PolicyRow, ...] = ()
    longest_wait_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """tiers, decode: None where the engine has none, or does not schedule decodes by shared prefixes."""

    load: EngineLoad = field(default_factory=EngineLoad)
    counters: EngineCounters = field(default_factory=EngineCounters)
    tiers: TierReport | None = None
    decode: DecodeReport | None = None
    costs: EngineCosts = field(default_factory=EngineCosts)


class EngineSession(Protocol):
    """A job whose prompt is still arriving. The engine computes what it has meanwhile, and samples nothing.

    Input is taken in between two engine steps, in order; `progress().inputs` counts what has been.
    """

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds to the end of the prompt. Raises OutOfRangeError when it would not fit the model: nothing changes."""
        ...

    def update(self, token_ids: Sequence[int]) -> None:
        """Replaces the whole prompt; the KV of the longest common prefix is kept. Raises as `append` does."""
        ...

    def finish(self, token_ids: Sequence[int] = ()) -> AsyncIterator[EngineOutput]:
        """Completes the prompt with these last tokens and runs the job, as `Engine.generate` does.

        Raises InvalidInputError for an empty prompt, and as `append` does: nothing changes then.
        No input is taken after it.
        """
        ...

    def progress(self) -> SessionProgress: ...

    async def changed(self) -> SessionProgress:
        """Waits until `progress` differs from what this call returned last. Raises UnavailableError when the engine
        dies meanwhile or the session was closed."""
        ...

    def close(self) -> None:
        """Ends the session wherever it stands and frees what it holds. Harmless after its end."""
        ...


class Engine(Protocol):
    """One engine, driven from one asyncio loop."""

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        """Brings the engine up. `on_phase` hears what it is doing, `on_death` that it died later, from any thread."""
        ...

    def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        """Runs a job. Closing the iterator early aborts the job and frees its blocks.

        Raises InvalidInputError for what the engine refuses, UnavailableError when it dies meanwhile.
        """
        ...

    def open_session(self, job: EngineJob, mode: SessionMode) -> EngineSession:
        """Opens a session with the prompt as far as it is known, which may be empty.

        Raises InvalidInputError for what the engine refuses, NotSupportedError where it has no sessions.
        """
        ...

    async def release(self, lease_id: str) -> bool:
        """Frees the blocks of a lease that nobody will pull; False when there is no such lease any more."""
        ...

    def status(self) -> EngineStatus: ...

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        """Cached prefixes, highest priority first. Waits for the engine to have a moment; empty without tiers."""
        ...

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        """So many prefix groups and so many waiting requests at most. Waits for the engine to have a moment; empty
        where `status` has no decode report."""
        ...

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        """From now on `on_change` hears on the loop, in order, how the cached chunks change, and first which there are.

        There is one follower: who follows later takes the place of who did before. May be called before `start`.
        """
        ...

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        """The cached chunks as the engine's own block pools have them, looked up there and not in what was told.

        Waits for the engine to have a moment. `on_look` is called on the loop at the place of the look among the
        changes: behind all that came before it, ahead of all that came after it. Empty for a dead engine.
        """
        ...

    async def stop(self) -> None: ...
