"""Whose prompts wait at a worker, and what engines compute of them after one that comes now. Pure.

Engines take turns (docs/decisions/0075): the lowest priority number first, and of one number tenants by weight. So of
what waits is computed, seen from a prompt that comes,
    before it     lower numbers; its own tenant's; each other tenant's of its number, as far as that one's weight allows
                  while its own tenant's prompts and itself are computed
    after it      the rest
About so: what a tenant has had of late is known to engines alone.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster_core.tenant_shares import Claimant


class Waiting(Protocol):
    """A prefill that waits, as lines see it. whose: None where nobody asks for it."""

    @property
    def whose(self) -> Claimant | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def pending_s(self) -> float: ...


@dataclass(slots=True)
class Line:
    """A tenant's prompts of one priority at one worker: how many, their tokens with those of their answers, and what
    they take of engine time."""

    requests: int = 0
    tokens: int = 0
    pending_s: float = 0.0
    weight: float = 1.0

    def add(self, other: "Line") -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.pending_s += other.pending_s
        self.weight = other.weight


Lines = Mapping[Claimant, Line]


class TenantLines:
    """Of one router's prefills, by row of its loads."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[Claimant, Line]] = {}

    def of(self, row: int) -> Lines:
        return self._rows.get(row, {})

    def add(self, row: int, work: Waiting) -> None:
        if work.whose is not None and 0 < work.pending_s < math.inf:
            line = self._rows.setdefault(row, {}).setdefault(work.whose, Line())
            line.add(Line(1, work.tokens, work.pending_s, work.weight))

    def remove(self, row: int, work: Waiting) -> None:
        """What `add` was called with."""
        if work.whose is None or not 0 < work.pending_s < math.inf:
            return
        lines = self._rows[row]
        line = lines[work.whose]
        line.add(Line(-1, -work.tokens, -work.pending_s, line.weight))
        if not line.requests:
            del lines[work.whose]

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)


def together(those: Iterable[Lines]) -> dict[Claimant, Line]:
    """Of one worker, as several routers have them."""
    all_lines: dict[Claimant, Line] = {}
    for lines in those:
        for whose, line in lines.items():
            all_lines.setdefault(whose, Line()).add(line)
    return all_lines


def behind(lines: Lines, whose: Claimant, weight: float, own_s: float) -> tuple[float, float, float]:
    """What engines compute after a prompt of somebody's that takes so long: seconds, requests, tokens.

    Best effort counts to best effort alone: others are told of a queue without it.
    """
    mine = lines.get(whose)
    turn_s = (own_s + (mine.pending_s if mine is not None else 0.0)) / weight
    seconds = requests = tokens = 0.0
    for other, line in lines.items():
        if other == whose or other.priority < whose.priority or (other.is_best_effort and not whose.is_best_effort):
            continue
        before_s = turn_s * line.weight if other.priority == whose.priority else 0.0
        after_s = line.pending_s - before_s
        if after_s <= 0:
            continue
        seconds += after_s
        requests += line.requests * after_s / line.pending_s
        tokens += line.tokens * after_s / line.pending_s
    return seconds, requests, tokens
