"""One request on its way through the router, and the leases it may hold."""

import secrets
from dataclasses import dataclass, field

from rachis.v1 import generation_pb2 as generation

from cluster_core.clock import monotonic_s
from cluster_core.errors import DeadlineError
from cluster_core.ids import RequestId
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.limits import max_tokens_of
from control_plane.model.worker_snapshot import WorkerSnapshot
from kv_transfer.claims.prefix_chunks import PackedPrompt


@dataclass(slots=True)
class Job:
    """One validated request on its way. Times are monotonic seconds; `own_s` is what the router itself took.

    Of a session, `token_ids` is the prompt as it stands, which is the session's own list, `prompt_changes` is true, and
    `own_s` leaves out what the pieces of its prompt took. packed: the prompt as placement sees it, once it has looked.
    """

    request_id: RequestId
    token_ids: list[int]
    sampling: generation.SamplingParams
    lifecycle: RequestLifecycle
    arrived_s: float
    deadline_s: float
    cache_salt: str = ""
    priority: int = 0
    prompt_changes: bool = False
    packed: PackedPrompt | None = None
    own_s: float = 0.0
    dispatched_s: float = 0.0
    first_token_s: float = 0.0
    engine_queue_ms: float = 0.0
    transfer_ms: float = 0.0
    attempts: int = 0
    # Workers know a request by this alone: a name aborts and releases there, and clients may repeat theirs, or choose
    # one that means something in the connector's own messages.
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    cached_tokens: int = 0
    route: generation.Route = field(default_factory=lambda: generation.Route(handoff=generation.HANDOFF_OUTCOME_NONE))

    @property
    def tokens(self) -> int:
        return len(self.token_ids) + max_tokens_of(self.sampling)

    def remaining_s(self) -> float:
        """Time left; raises DeadlineError when there is none."""
        left = self.deadline_s - monotonic_s()
        if left <= 0:
            raise DeadlineError("the request's deadline passed")
        return left

    def attempt_id(self) -> str:
        self.attempts += 1
        return f"r{self.nonce}.{self.attempts}"


@dataclass(slots=True)
class Lease:
    """KV blocks that a prefill worker may be keeping for this request.

    safe_at_s: from when on no decode worker pulls them any more; monotonic.
    """

    worker: WorkerSnapshot
    lease_id: str
    safe_at_s: float = 0.0
