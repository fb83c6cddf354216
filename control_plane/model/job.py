"""One request on its way through the router, and the leases it may hold."""

import secrets
from dataclasses import dataclass, field
from typing import TypeAlias

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import DeadlineError
from cluster_core.ids import RequestId
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.limits import max_tokens_of
from control_plane.model.prefix_scope import PrefixScope
from control_plane.model.worker_snapshot import WorkerSnapshot
from kv_transfer.claims.prefix_chunks import PackedPrompt

HandoffOutcome: TypeAlias = "generation.HandoffOutcome.ValueType"
FinishReason: TypeAlias = "generation.FinishReason.ValueType"

# What became of a lease: the values that a journey has to tell apart.
NO_HANDOFF: HandoffOutcome = generation.HANDOFF_OUTCOME_NONE
RECOMPUTED: HandoffOutcome = generation.HANDOFF_OUTCOME_RECOMPUTED


@dataclass(slots=True)
class Job:
    """One validated request on its way. Times are monotonic seconds."""

    request_id: RequestId
    # Of a session the prompt as it stands, which is the session's own list.
    token_ids: list[int]
    sampling: generation.SamplingParams
    lifecycle: RequestLifecycle
    arrived_s: float
    deadline_s: float
    scope: PrefixScope = field(default_factory=PrefixScope)
    priority: int = 0
    # Whose it is; empty in a service without keys.
    tenant: str = ""
    # That tenant, as workers are told of it.
    share: wire.TenantShare = field(default_factory=wire.TenantShare)
    # A session's prompt may still grow or change.
    prompt_changes: bool = False
    # The prompt as placement sees it, once it has looked, and how many tokens of the answer are part of it.
    packed: PackedPrompt | None = None
    packed_emitted: int = 0
    # What the router itself took; of a session without what the pieces of its prompt took.
    own_s: float = 0.0
    dispatched_s: float = 0.0
    first_token_s: float = 0.0
    engine_queue_ms: float = 0.0
    transfer_ms: float = 0.0
    attempts: int = 0
    # Engines that died while they worked on it, or on one that asked for the same.
    deaths: int = 0
    # Workers know a request by this alone: a name aborts and releases there, and clients may repeat theirs, or choose
    # one that means something in the connector's own messages.
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    cached_tokens: int = 0
    # The answer so far, which the client has: its tokens, and the characters of its text that could be shown.
    emitted: list[int] = field(default_factory=list)
    emitted_chars: int = 0
    # Why the answer has ended, where the client of a resumed one has all of it but its completion.
    finish_reason: FinishReason = generation.FINISH_REASON_UNSPECIFIED
    # Its client knows the adapter's digest.
    adapter_is_told: bool = False
    # Nothing of what was asked for is answered yet: placement may say that it cannot be in time.
    may_be_refused: bool = True
    # Times that the answer went on elsewhere after it had begun to decode.
    migrations: int = 0
    # Who has computed its prompt last, for another worker to decode.
    prefilled_by: str = ""
    route: generation.Route = field(default_factory=lambda: generation.Route(handoff=generation.HANDOFF_OUTCOME_NONE))

    @property
    def max_tokens(self) -> int:
        return max_tokens_of(self.sampling)

    @property
    def tokens(self) -> int:
        return len(self.token_ids) + self.max_tokens

    @property
    def emitted_to_prefill(self) -> int:
        """Tokens of an answer that goes on elsewhere: they are prefilled there, behind the prompt."""
        return len(self.emitted) if self.migrations or self.route.resumed_tokens else 0

    @property
    def generated_tokens(self) -> int:
        """Of the answer, that came of it here, once it has ended."""
        answered = self.lifecycle.trace.answered
        return 0 if answered is None else max(0, answered.completion_tokens - self.route.resumed_tokens)

    def resume(self, received: api.ReceivedAnswer) -> None:
        """It goes on behind what its client has of the answer, from another router."""
        self.emitted = list(received.token_ids)
        self.emitted_chars = received.text_characters
        self.finish_reason = received.finish_reason
        self.route.resumed_tokens = len(self.emitted)

    def remaining_s(self, now_s: float) -> float:
        """Time left; raises DeadlineError when there is none."""
        left = self.deadline_s - now_s
        if left <= 0:
            raise DeadlineError("the request's deadline passed")
        return left

    def attempt_id(self) -> str:
        self.attempts += 1
        return f"r{self.nonce}.{self.attempts}"


@dataclass(slots=True)
class Lease:
    """KV blocks that a worker may be keeping for this request."""

    worker: WorkerSnapshot
    lease_id: str
    # From when on no decode worker pulls them any more; monotonic.
    safe_at_s: float = 0.0
