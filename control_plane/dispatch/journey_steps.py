"""What a journey is told, and what it has its driver do: the events and instructions of `journey`.

Times are monotonic seconds. `piece` and `first` are what the driver writes to the client: the journey passes them on.
`token_ids` and `chars` are what it remembers of them: the tokens, and how many characters of text they show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from control_plane.model.job import HandoffOutcome, Lease
from control_plane.model.worker_snapshot import WorkerSnapshot

# Workers that have failed the request, or refused it while they drain: (worker, generation).
Excluded = frozenset[tuple[str, int]]


class Cause(Enum):
    """Why a request ends without an answer that is whole."""

    DEADLINE = "deadline"
    NO_DECODE_WORKER = "no_decode_worker"
    DECODE_WORKER_LOST = "decode_worker_lost"
    POISON = "poison"


class Stage(Enum):
    """What the journey waits for."""

    NOTHING = "nothing"
    ROUTE = "route"
    PREFILL_WORKER = "prefill_worker"
    PREFILL = "prefill"
    PROMPT = "prompt"
    DECODE_WORKER = "decode_worker"
    DECODE = "decode"
    DECODE_CALL_ENDS = "decode_call_ends"
    OVER = "over"


# Events.


@dataclass(frozen=True, slots=True)
class Begun:
    """The request has been admitted."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The answer to `Route`, `PlacePrefill` and `PlaceDecode`; no worker where none may get the request."""

    worker: WorkerSnapshot | None
    # Nothing more comes to the prompt: it is prefilled in one go, and pulled right after.
    prompt_is_whole: bool = True
    decode_is_usable: bool = True


@dataclass(frozen=True, slots=True)
class PromptComplete:
    """The answer to `AwaitPrompt`."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prefill worker has sampled the first token, or the next one of an answer that goes on elsewhere."""

    first: Any = None
    token_ids: Sequence[int] = ()
    chars: int = 0
    # Where that is the end of the answer: why it ends, and tokens of all of it.
    finish_reason: int | None = None
    completion_tokens: int = 1
    cached_tokens: int = 0
    engine_queue_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The decode worker has the prompt's KV. handoff: what became of the lease, by its own account."""

    handoff: HandoffOutcome
    cached_tokens: int = 0
    pulled_tokens: int = 0
    kv_bytes: int = 0
    transfer_ms: float = 0.0
    kv_descriptors: int = 0


@dataclass(frozen=True, slots=True)
class Generated:
    """The decode worker has generated tokens."""

    piece: Any = None
    token_ids: Sequence[int] = ()
    chars: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The decode worker has generated the last token. piece: what comes with it; None: everything has come before."""

    finish_reason: int
    completion_tokens: int
    piece: Any = None


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A decode worker that drains has ended the answer, and leases the KV of all its tokens but the last."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The call has ended without an answer, in a way that lets another worker try."""

    sentence: str = ""
    # The worker takes nothing new, and counts as no attempt.
    is_draining: bool = False
    # It had the request when it began to drain, and was left.
    was_left: bool = False
    # It hangs, or is slow enough to look like that, and was left.
    has_stalled: bool = False
    # Its process or its engine ended while the request was there.
    has_died: bool = False
    # It was never there: that counts as no attempt either.
    is_unreachable: bool = False
    # It cannot load the request's adapter, and serves all others.
    lacks_adapter: bool = False

    @property
    def is_attempt(self) -> bool:
        """It counts as one."""
        return not (self.is_draining or self.is_unreachable)

    @property
    def may_answer_again(self) -> bool:
        """Its connection failed, which says nothing against the worker."""
        return not (self.is_draining or self.has_stalled or self.has_died or self.lacks_adapter)

    @property
    def may_have_pulled(self) -> bool:
        """A decode worker that was told of a lease."""
        return (self.is_attempt and not self.lacks_adapter) or self.was_left


@dataclass(frozen=True, slots=True)
class Closed:
    """The driver carries out nothing more: the request has ended, or its client is gone."""


Event = (
    Begun | Placed | PromptComplete | Prefilled | DecodeStarted | Generated | Ended | HandedOver | WorkerLost | Closed
)


# Instructions that an event answers. At most one of them is under way.


@dataclass(frozen=True, slots=True)
class Route:
    """Decide where the prompt is prefilled: on which prefill worker, or where it decodes (no worker)."""


@dataclass(frozen=True, slots=True)
class PlacePrefill:
    """Choose another prefill worker."""

    excluded: Excluded


@dataclass(frozen=True, slots=True)
class PlaceDecode:
    """Choose a decode worker. prefills: it has to compute the prompt. avoided: those that get it where there is no
    other."""

    excluded: Excluded
    prefills: bool
    # How long one is waited for, from when the driver begins to: after the client has taken its first token.
    wait_s: float
    deadline_s: float
    avoided: Excluded = frozenset()

    def most_s(self, now_s: float) -> float:
        """How long a wait may take that begins now."""
        return min(self.wait_s, self.deadline_s - now_s)


@dataclass(frozen=True, slots=True)
class AwaitPrompt:
    """No prefill worker computes the prompt: wait until it is whole."""


@dataclass(frozen=True, slots=True)
class CallPrefill:
    """Have the worker compute the prompt and sample the first token. lease_id: the call's name there."""

    worker: WorkerSnapshot
    lease_id: str
    hand_off: bool
    until_s: float


@dataclass(frozen=True, slots=True)
class CallDecode:
    """Have the worker generate. pulls: it is told of the lease, and pulls the prompt's KV."""

    worker: WorkerSnapshot
    request_id: str
    pulls: bool
    # The answer leaves the worker where that one drains.
    may_move: bool
    # Where it hangs, the call leaves the worker for any that is usable but these: else it waits until that one goes on,
    # or is ended.
    hung: Excluded
    until_s: float


Call = Route | PlacePrefill | PlaceDecode | AwaitPrompt | CallPrefill | CallDecode


# Instructions that are carried out at once.


@dataclass(frozen=True, slots=True)
class CountPrompt:
    """The prompt is whole, and counts towards the hotness of its prefix."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Write this to the client."""

    piece: Any


@dataclass(frozen=True, slots=True)
class Suspect:
    """The worker did not answer: it gets nothing until it is heard of again."""

    worker: WorkerSnapshot
    sentence: str


@dataclass(frozen=True, slots=True)
class Blame:
    """The worker died while it worked on the request, which may be why."""

    worker: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class MarkDraining:
    """The worker said that it drains, before the registry did."""

    worker: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease back at `lease.safe_at_s`, not before."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Complete:
    """Write the completion: the request has finished."""

    finish_reason: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that the request has ended without a whole answer."""

    cause: Cause
    sentence: str
    retry_after_ms: int = 0


Deed = CountPrompt | Emit | Suspect | Blame | MarkDraining | Release | Complete | Fail
Instruction = Call | Deed
