"""What `decode_worker.batching` is about: requests that wait or are in the batch, plans, and why."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from cluster_core.engine_jobs import NOBODY, TenantShare
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.stop_policies import Decision

_RECENT = 1024


class Reason(Enum):
    """Why a request was admitted."""

    # By order of arrival.
    FCFS = "fcfs"
    POLICY = "policy"
    # Its priority is above all others of the batch.
    PRIORITY = "priority"
    # It took the lead.
    TURN = "turn"
    OVERDUE = "overdue"
    # Nothing ran.
    IDLE = "idle"
    # Another one would have been chosen, whose tenant is too far ahead.
    SHARE = "share"


class Cause(Enum):
    """Why a request waits."""

    # There is no place, or no memory.
    CAPACITY = "capacity"
    # The policy holds it.
    HELD = "held"
    # Its prefix is on its way to the device.
    PREFIX = "prefix"
    # Its tenant is too far ahead of another one that waits.
    SHARE = "share"


@dataclass(slots=True, eq=False)
class Standing:
    """Of a tenant, among those that wait with its priority. held: how many of it the policy would be said to hold."""

    is_in_turn: bool = True
    held: int = 0
    # Seconds out of turn, up to when it last changed.
    _out_s: float = 0.0
    _since_s: float = 0.0

    def out_until(self, now_s: float) -> float:
        """How long it has been out of turn since it waits."""
        return self._out_s if self.is_in_turn else self._out_s + now_s - self._since_s

    def turn(self, now_s: float) -> None:
        """It is out of turn where it was in turn, or in turn again."""
        self._out_s, self._since_s, self.is_in_turn = self.out_until(now_s), now_s, not self.is_in_turn


@dataclass(slots=True, eq=False)
class Member:
    """A request that waits or is in the batch. Times are seconds of one clock."""

    request_id: str
    hashes: Sequence[ChunkHash]
    priority: int
    arrival: int
    arrived_s: float
    # When its turn came, as far as there was a place since; inf until known.
    turn_s: float = inf
    # When it is overdue; inf until known.
    due_s: float = inf
    # How long it has waited for a prefix that is being pulled, up to `prefix_since_s` where it does so now.
    prefix_s: float = 0.0
    prefix_since_s: float | None = None
    # Since when it has been chosen and waits for memory alone; inf: it does not.
    refused_s: float = inf
    # Whether its KV has to be pulled.
    pulls: bool = False
    # Of its prompt.
    tokens: int = 0
    tenant: TenantShare = NOBODY
    # That of its tenant; None until it waits.
    standing: Standing | None = None
    # For how long it was out of turn between its turn and its admission, or the first time that it was refused; less
    # what its standing had then until that is known.
    out_of_turn_s: float = 0.0

    @property
    def cause(self) -> Cause:
        return Cause.PREFIX if self.prefix_since_s is not None else self.held_by

    @property
    def held_by(self) -> Cause:
        """The cause, but for a prefix."""
        if self.turn_s == inf or self.refused_s < inf:
            return Cause.CAPACITY
        return Cause.HELD if self.standing is None or self.standing.is_in_turn else Cause.SHARE

    def waits_for_prefix_no_more(self, now_s: float) -> None:
        if self.prefix_since_s is not None:
            self.prefix_s += now_s - self.prefix_since_s
            self.prefix_since_s = None


@dataclass(frozen=True, slots=True)
class Joining:
    """One admission of a plan."""

    member: Member
    reason: Reason
    loss_chunks: int = 0
    # None where the policy did not decide.
    decision: Decision | None = None
    # False: an overdue request that would spoil what the cohort shares decodes along outside it.
    joins_cohort: bool = True


@dataclass(frozen=True, slots=True)
class FormerLead:
    """What stood before a request took the lead."""

    # vLLM has to admit it, or all is as before.
    lead: Member
    # The one that was left.
    cohort: Sequence[str]
    lead_s: float
    lead_until_s: float


@dataclass(slots=True)
class Plan:
    """Which requests join, in this order, of `places`."""

    places: int
    # Of a request that takes the lead, what stood before.
    former: FormerLead | None = None
    joining: list[Joining] = field(default_factory=list)
    # The decision that ended it, if one did.
    stop: Decision | None = None

    @property
    def request_ids(self) -> list[str]:
        return [each.member.request_id for each in self.joining]

    def decisions(self, admitted: Collection[str]) -> list[Decision]:
        """Those that formed the batch, given which requests of it were admitted."""
        made = [each.decision for each in self.joining if each.decision and each.member.request_id in admitted]
        return [*made, self.stop] if self.stop is not None and len(admitted) == len(self.joining) else made


@dataclass(slots=True)
class BatchingCounters:
    """Since the start."""

    admissions: Counter[Reason] = field(default_factory=Counter)
    # Of those admitted.
    wait_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    # What admissions took from the tip, added up.
    lost_chunks: int = 0
    longest_held_s: float = 0.0
    # Of the last ones.
    recently_held_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    decisions: int = 0

    def joined(self, joining: Joining, now_s: float) -> None:
        member = joining.member
        since_turn_s = max(0.0, min(now_s, member.refused_s) - member.turn_s - member.prefix_s)
        share_s = min(max(0.0, member.out_of_turn_s), since_turn_s)
        held_s = since_turn_s - share_s
        self.wait_s[Cause.PREFIX] += member.prefix_s
        self.wait_s[Cause.SHARE] += share_s
        self.wait_s[Cause.HELD] += held_s
        self.wait_s[Cause.CAPACITY] += max(0.0, now_s - member.arrived_s - since_turn_s - member.prefix_s)
        self.longest_held_s = max(self.longest_held_s, held_s)
        self.recently_held_s.append(held_s)
        self.admissions[joining.reason] += 1
        self.lost_chunks += joining.loss_chunks
