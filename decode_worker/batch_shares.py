"""Whose request joins the decode batch next where several tenants wait: how far a policy may depart from that. Pure.

Each tenant has a place in virtual time (`cluster_core.tenant_shares`), of each priority by itself: a request that joins
moves it on by its prompt's tokens over the tenant's weight. A policy chooses freely among tenants that are no more than
`SLACK_TOKENS` ahead of the one furthest behind; others wait, overdue or not. Where it would choose one of those, the
tenant furthest behind is next, with the request that came first: one that was preempted keeps the number of its
arrival, and goes before none that came earlier. It joins again for as many tokens as before.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from math import inf

from cluster_core.tenant_shares import LEAST_TOKENS, Claimant, TenantShares
from decode_worker.batch_members import Member

# Tokens for a weight of 1: a few long prompts, so that a prefix attracts some of those that share it.
SLACK_TOKENS = 16_384


class _Line:
    """Of one claimant. came: in order of arrival; returned: preempted, few."""

    def __init__(self) -> None:
        self.came: dict[str, Member] = {}
        self.returned: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self.came) + len(self.returned)

    def first(self, planned: dict[str, Member]) -> Member | None:
        """Who came first of those not planned."""
        came = next((each for name, each in self.came.items() if name not in planned), None)
        returned = (each for name, each in self.returned.items() if name not in planned)
        return min(chain(returned, () if came is None else (came,)), key=lambda each: each.arrival, default=None)


class BatchShares:
    """Told of every request that waits, is planned, joins and goes."""

    def __init__(self) -> None:
        self._shares = TenantShares()
        self._lines: dict[Claimant, _Line] = {}
        self._planned: dict[str, Member] = {}
        # Virtual tokens of those planned.
        self._planned_tokens: defaultdict[Claimant, float] = defaultdict(float)
        # By priority the furthest place of those in turn, until something changes.
        self._limits: dict[int, float] = {}

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant waits in one line of priority."""
        return len(self._lines) > 1

    def waits(self, member: Member) -> None:
        self._line(member).came[member.request_id] = member

    def returned(self, member: Member) -> None:
        """It was preempted, and waits again."""
        self._line(member).returned[member.request_id] = member

    def planned(self, member: Member) -> None:
        """It will join, unless `settled` comes first."""
        self._planned[member.request_id] = member
        self._planned_tokens[_whose(member)] += _tokens(member) / member.tenant.part
        self._limits.clear()

    def joined(self, member: Member) -> None:
        """One that waits; it `left` besides."""
        self._shares.begins(_whose(member), _tokens(member), member.tenant.part)

    def left(self, member: Member) -> None:
        """It waits no more, whatever became of it."""
        whose = _whose(member)
        line = self._lines[whose]
        line.came.pop(member.request_id, None)
        line.returned.pop(member.request_id, None)
        if not len(line):
            del self._lines[whose]
            self._shares.leaves(whose)
        self._limits.clear()

    def settled(self) -> None:
        """Nobody is planned any more."""
        self._planned.clear()
        self._planned_tokens.clear()
        self._limits.clear()

    def is_in_turn(self, member: Member) -> bool:
        """Whether a policy may choose this one of those that wait."""
        if self._shares.count(member.priority) <= 1:
            return True
        if member.priority not in self._limits:
            behind = min((place for place, _, _ in self._places(member.priority)), default=inf)
            self._limits[member.priority] = behind + SLACK_TOKENS
        return self._place(_whose(member)) <= self._limits[member.priority]

    def furthest_behind(self, priority: int) -> Member:
        """The first of the tenant furthest behind. ValueError where nobody of that priority waits unplanned."""
        return min(self._places(priority))[2]

    def check_invariants(self) -> None:
        self._shares.check_invariants()
        assert self._shares.here == self._lines.keys(), "somebody has a share and does not wait"
        assert all(map(len, self._lines.values())), "a line of nobody"

    def _line(self, member: Member) -> _Line:
        whose = _whose(member)
        if whose not in self._lines:
            self._lines[whose] = _Line()
            self._shares.comes(whose)
        self._limits.clear()
        return self._lines[whose]

    def _places(self, priority: int) -> Iterator[tuple[float, int, Member]]:
        """Of each tenant that waits with that priority its place, the arrival of its first request, and that."""
        for whose, line in self._lines.items():
            first = line.first(self._planned) if whose.priority == priority else None
            if first is not None:
                yield self._place(whose), first.arrival, first

    def _place(self, whose: Claimant) -> float:
        return self._shares.start(whose) + self._planned_tokens.get(whose, 0.0)


def _whose(member: Member) -> Claimant:
    return Claimant(member.priority, member.tenant.tenant_id)


def _tokens(member: Member) -> int:
    return max(member.tokens, LEAST_TOKENS)
