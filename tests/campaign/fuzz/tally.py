"""What a fuzzer has done and found, added up."""

import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kv_transfer.tiers.tier_terms import TierCounters

FINDINGS_TOLD = 5


def raised(error: Exception) -> str:
    """An error as a finding: what it says and where it came from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno})"


@dataclass(slots=True)
class Tally:
    """sessions and requests: those whose answers were compared. requests: plain ones beside the sessions.

    joined_...: requests that a decode scheduler admitted, by its reasons. copied_out, copied_back, promoted: blocks of
    cached prefixes between device and host memory; copied_back_async: those that no step waited for;
    swapped_back_async: likewise, blocks of swapped sessions;
    evicted_..._for_others: those that tenants gave up for each other.
    emitted: requests that arrived with a part of their answer. leases: prompts that were handed off. bounded, yielded:
    steps whose chunk was that of the objective, or more.
    """

    sessions: int = 0
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    cancelled: int = 0
    emitted: int = 0
    leases: int = 0
    bounded: int = 0
    yielded: int = 0
    appends: int = 0
    updates: int = 0
    swaps: int = 0
    recomputes: int = 0
    loads: int = 0
    failed_loads: int = 0
    joined_fcfs: int = 0
    joined_policy: int = 0
    joined_priority: int = 0
    joined_turn: int = 0
    joined_overdue: int = 0
    joined_idle: int = 0
    joined_share: int = 0
    invalidated_tokens: int = 0
    copied_out: int = 0
    copied_back: int = 0
    copied_back_async: int = 0
    swapped_back_async: int = 0
    promoted: int = 0
    evicted_device_for_others: int = 0
    evicted_host_for_others: int = 0

    def add(self, other: "Tally") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count_tiers(self, before: TierCounters, after: TierCounters) -> None:
        """What the tiers have done between two points in time."""
        for name in (
            "copied_out",
            "copied_back",
            "copied_back_async",
            "promoted",
            "evicted_device_for_others",
            "evicted_host_for_others",
        ):
            setattr(self, name, getattr(self, name) + getattr(after, name) - getattr(before, name))

    def told(self) -> dict[str, Any]:
        """As JSON: `wrong` is a number, and the first few are told in `findings`."""
        return {**asdict(self), "wrong": len(self.wrong), "findings": self.wrong[:FINDINGS_TOLD]}


def until(compared: int, tallies: Iterator[Tally], what: Literal["sessions", "requests"] = "sessions") -> Tally:
    """The sum over worlds until the answers of so many were compared or something was wrong."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
        if total.wrong or getattr(total, what) >= compared:
            return total
    raise AssertionError("worlds have no end")
