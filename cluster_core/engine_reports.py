"""What an engine says of itself while it runs: what it is, its load, counts, costs, cached prefixes and decode batch.

Counts run since the engine started; `_blocks` are blocks, `_s` seconds. `worker_runtime.wire_table` says which report
travels as which message; where a docstring names a message, the meaning of the fields is written there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while the engine runs."""

    model: str
    tokenizer: str
    vocabulary_size: int
    max_model_len: int
    block_size_tokens: int
    max_running_requests: int
    dtype: str
    max_adapters: int = 0
    # The cost model of an imitated GPU, which computes nothing; empty: the engine is real.
    imitates: str = ""
    # What this model cannot have here, by `kv_transfer.model_features.Feature`, and why.
    missing_features: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine holds now."""

    running_requests: int = 0
    waiting_requests: int = 0
    leased_handoffs: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    open_sessions: int = 0
    free_host_blocks: int = 0
    total_host_blocks: int = 0
    # How long the engine has been in a step, command or copy that should have ended long ago; 0 where it works. See
    # `heartbeat`.
    stalled_s: float = 0.0
    # That a pull may still write into which its request has given up; see `kv_transfer.handoff.overdue_pulls`.
    quarantined_blocks: int = 0


@dataclass(slots=True)
class EngineCounters:
    """Counts of requests, tokens and hand-offs; written by the engine alone."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    handoffs_leased: int = 0
    handoffs_pulled: int = 0
    handoffs_recomputed: int = 0
    handoffs_expired: int = 0
    handoffs_mismatched: int = 0
    handoffs_verified: int = 0
    handoffs_released: int = 0
    kv_bytes_pulled: int = 0
    kv_descriptors_pulled: int = 0
    # The meaning of these two is that of `rachis.v1.WorkerRegistration`.
    cacheable_requests: int = 0
    stored_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What work costs in this engine, measured while it runs; see `rachis.v1.WorkerCosts`. 0: not measured yet."""

    prefill_s_per_token: float = 0.0
    load_s_per_token: float = 0.0
    decode_step_s: float = 0.0
    pull_s: float = 0.0
    pull_s_per_token: float = 0.0
    prefill_s: float = 0.0
    prefill_s_per_pair: float = 0.0
    adapter_load_s: float = 0.0
    decode_s: float = 0.0
    decode_s_per_request: float = 0.0
    decode_s_per_token: float = 0.0


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
    """The two tiers of an engine's cached prefixes, device and host memory; see `rachis.v1.TierReport`."""

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
    # Of these, for requests that waited for them while steps computed others.
    copied_back_async_blocks: int
    copied_back_bytes: int
    copy_back_s: float
    failed_copy_blocks: int
    # By reason.
    refused_offers: Mapping[str, int]
    promoted_blocks: int
    promoted_used_blocks: int
    promoted_wasted_blocks: int
    evicted_device_blocks: int
    evicted_host_blocks: int
    # Of these, of tenants that claimed room while others did so as well.
    evicted_device_for_others_blocks: int
    evicted_host_for_others_blocks: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A cached prefix; see `rachis.v1.HotPrefix`."""

    hash: str
    # How long it is.
    tokens: int
    device_blocks: int
    host_blocks: int
    frequency: int
    priority: float


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """How a decode engine forms its batch; see `rachis.v1.DecodeReport`. `_sum` adds up over steps."""

    # As it is now.
    policy: str
    mode: str
    running_requests: int
    loading_requests: int
    tip_tokens: int
    working_set_tokens: int
    # By cause.
    waiting: Mapping[str, int]
    # Since the engine started.
    steps: int
    batch_sum: int
    shared_tokens_sum: int
    # By reason.
    admissions: Mapping[str, int]
    lost_tokens: int
    # By cause.
    wait_s: Mapping[str, float]
    longest_held_s: float
    decisions: int
    decision_s: float
    probes: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests that share a prefix; see `rachis.v1.PrefixGroup`."""

    hash: str
    # How long the prefix is.
    tokens: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request outside the decode batch; see `rachis.v1.WaitingRequest`."""

    request_id: str
    prompt_tokens: int
    waited_s: float
    cause: str
    # Of its prompt, with the batch.
    shared_tokens: int
    priority: int


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What a stop policy has learned in one state; see `rachis.v1.PolicyRow`."""

    # The bins of the state, for people.
    batch: str
    loss: str
    peers: str
    adds: int
    stops: int
    # None where the action was never taken.
    add_value: float | None
    stop_value: float | None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The decode batch in detail."""

    # Largest first.
    groups: tuple[PrefixGroup, ...] = ()
    # In the order of arrival.
    waiting: tuple[WaitingRequest, ...] = ()
    # Empty for a policy that does not learn.
    table: tuple[PolicyRow, ...] = ()
    # Of those that wait now, by cause.
    longest_wait_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """All of the above that is at hand without asking the engine's thread."""

    load: EngineLoad = field(default_factory=EngineLoad)
    counters: EngineCounters = field(default_factory=EngineCounters)
    # None where the engine has no tiers.
    tiers: TierReport | None = None
    # None where the engine does not schedule decodes by shared prefixes.
    decode: DecodeReport | None = None
    costs: EngineCosts = field(default_factory=EngineCosts)
