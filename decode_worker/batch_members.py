"""What `decode_worker.batching` is about: requests that wait or are in the batch, plans, and why."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from decode_worker.chunk_hashes import ChunkHash
from decode_worker.stop_policies import Decision

_RECENT = 1024


class Reason(Enum):
    """Why a request was admitted: by order of arrival; by the policy; its priority is above all others of the batch; it
    took the lead; it was overdue; nothing ran."""

    FCFS = "fcfs"
    POLICY = "policy"
    PRIORITY = "priority"
    TURN = "turn"
    OVERDUE = "overdue"
    IDLE = "idle"


class Cause(Enum):
    """Why a request waits: no place or memory; the policy; its prefix is on its way to the device."""

    CAPACITY = "capacity"
    HELD = "held"
    PREFIX = "prefix"


@dataclass(slots=True, eq=False)
class Member:
    """A request that waits or is in the batch. Times are seconds of one clock.

    turn_s: when its turn came, as far as there was a place since; due_s: when it is overdue; both inf until known.
    prefix_s: how long it has waited for a prefix that is being pulled, up to prefix_since_s where it does so now.
    refused_s: since when it has been chosen and waits for memory alone; inf: it does not. pulls: whether its KV has to
    be pulled.
    """

    request_id: str
    hashes: Sequence[ChunkHash]
    priority: int
    arrival: int
    arrived_s: float
    turn_s: float = inf
    due_s: float = inf
    prefix_s: float = 0.0
    prefix_since_s: float | None = None
    refused_s: float = inf
    pulls: bool = False

    @property
    def cause(self) -> Cause:
        if self.prefix_since_s is not None:
            return Cause.PREFIX
        return Cause.HELD if self.turn_s < inf and self.refused_s == inf else Cause.CAPACITY


@dataclass(frozen=True, slots=True)
class Joining:
    """One admission of a plan. decision: None where the policy was not asked."""

    member: Member
    reason: Reason
    loss_chunks: int = 0
    decision: Decision | None = None
    # False: an overdue request that would spoil what the cohort shares decodes along outside it.
    joins_cohort: bool = True


@dataclass(frozen=True, slots=True)
class FormerLead:
    """lead: whom vLLM has to admit, or all is as before. cohort: the one that was left."""

    lead: Member
    cohort: Sequence[str]
    lead_s: float
    lead_until_s: float


@dataclass(slots=True)
class Plan:
    """Who joins, in this order, of `places`. stop: the decision that ended it, if one did."""

    places: int
    # Of a request that takes the lead, what stood before.
    former: FormerLead | None = None
    joining: list[Joining] = field(default_factory=list)
    stop: Decision | None = None

    @property
    def request_ids(self) -> list[str]:
        return [each.member.request_id for each in self.joining]

    def decisions(self, admitted: Collection[str]) -> list[Decision]:
        """Those that formed the batch, given who was admitted of it."""
        made = [each.decision for each in self.joining if each.decision and each.member.request_id in admitted]
        return [*made, self.stop] if self.stop is not None and len(admitted) == len(self.joining) else made


@dataclass(slots=True)
class BatchingCounters:
    """Since the start. lost_chunks: what admissions took from the tip, added up. wait_s: of those admitted.
    recently_held_s: of the last ones."""

    admissions: Counter[Reason] = field(default_factory=Counter)
    wait_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    lost_chunks: int = 0
    longest_held_s: float = 0.0
    recently_held_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    decisions: int = 0
