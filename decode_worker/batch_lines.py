"""Lines of the requests that wait for the decode batch, one for each tenant and priority; those of a priority in order.

A line has a place in virtual time. It is in turn while it is no more than the slack ahead of the one furthest behind.
The slack is so many tokens of the line's own tenant, whatever the scale of weights: who waits for it then waits for so
many real tokens. By the weight of the one behind, a tenant of little weight would let others have its slack many times.

All that is asked of lines is found by bisection, and a change moves one line alone. Lines go in and out of turn as the
one furthest behind moves: each is looked at when it does. Pure.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from cluster_core.tenant_shares import Claimant
from decode_worker.batch_members import Member, Standing


@dataclass(slots=True, eq=False)
class Line(Standing):
    """Of one claimant. part: the weight of who came last."""

    whose: Claimant = field(default_factory=Claimant)
    part: float = 1.0
    # By arrival; those planned stand aside.
    members: list[Member] = field(default_factory=list)
    planned: dict[str, Member] = field(default_factory=dict)
    # Virtual tokens of those planned.
    planned_tokens: float = 0.0
    # Where it stands in the lists of its priority: its place, how far back its slack reaches, its first arrival.
    place: float = 0.0
    edge: float = 0.0
    first: int = 0

    def add(self, member: Member) -> None:
        insort(self.members, member, key=_arrival)

    def remove(self, member: Member) -> bool:
        """False: it is not among those unplanned."""
        index = bisect_left(self.members, member.arrival, key=_arrival)
        if index == len(self.members) or self.members[index] is not member:
            return False
        del self.members[index]
        return True


class Lines:
    """Those of one priority that have somebody unplanned."""

    def __init__(self) -> None:
        self.by_arrival: list[tuple[int, Line]] = []
        # Arrivals differ: lines are never compared.
        self._by_place: list[tuple[float, int, Line]] = []
        self._by_edge: list[tuple[float, int, Line]] = []
        # The place furthest behind, as far as lines have heard: those whose edge is no further are in turn.
        self._behind = inf

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def put(self, line: Line) -> bool:
        """Whether it is in turn, as far as lines have heard."""
        line.first = line.members[0].arrival
        insort(self._by_place, (line.place, line.first, line))
        insort(self._by_edge, (line.edge, line.first, line))
        insort(self.by_arrival, (line.first, line))
        return line.edge <= self._behind

    def take(self, line: Line) -> None:
        del self._by_place[bisect_left(self._by_place, (line.place, line.first))]
        del self._by_edge[bisect_left(self._by_edge, (line.edge, line.first))]
        del self.by_arrival[bisect_left(self.by_arrival, (line.first,))]

    def furthest_behind(self) -> Line:
        return self._by_place[0][2]

    def heard(self) -> tuple[list[Line], list[Line]]:
        """The lines that have come into turn since, and those that are out of it."""
        before, self._behind = self._behind, self._by_place[0][0] if self._by_place else inf
        start, end = (bisect_left(self._by_edge, (edge, inf)) for edge in sorted((before, self._behind)))
        changed = [line for _, _, line in self._by_edge[start:end]]
        return (changed, []) if before < self._behind else ([], changed)


def merged(heads: list[tuple[int, Line]]) -> Iterator[Member]:
    """The members of lines by arrival, given the lines by the first of each: no line is looked at before its turn."""
    begun: list[tuple[int, int, Line]] = []
    number = 0
    while begun or number < len(heads):
        if number < len(heads) and (not begun or heads[number][0] < begun[0][0]):
            index, line = 0, heads[number][1]
            number += 1
        else:
            _, index, line = heappop(begun)
        yield line.members[index]
        if index + 1 < len(line.members):
            heappush(begun, (line.members[index + 1].arrival, index + 1, line))


def _arrival(member: Member) -> int:
    return member.arrival
