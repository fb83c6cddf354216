"""Whose request joins the decode batch next where several tenants wait: how far a policy may depart from that. Pure.

Each tenant has a place in virtual time (`cluster_core.tenant_shares`), of each priority by itself: a request that joins
moves it on by its prompt's tokens over the tenant's weight. A policy chooses freely among tenants that are in turn: no
more than `SLACK_TOKENS` of their own ahead of the one furthest behind. Others wait, overdue or not, and that is no time
for which the policy holds them. Within a tenant a request that was preempted keeps the number of its arrival, and goes
before none that came earlier. It joins again for as many tokens as before.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from cluster_core.tenant_shares import LEAST_TOKENS, Claimant, TenantShares
from decode_worker.batch_lines import Line, Lines, merged
from decode_worker.batch_members import Member

# A few long prompts, so that a prefix attracts some of those that share it.
SLACK_TOKENS = 16_384


class BatchShares:
    """Told of every request that waits, is planned, joins and goes."""

    def __init__(self, slack_tokens: int = SLACK_TOKENS) -> None:
        self._slack_tokens = slack_tokens
        self._shares = TenantShares()
        self._lines: dict[Claimant, Line] = {}
        # Of each priority the lines with somebody unplanned; and these priorities, least first.
        self._of_priority: dict[int, Lines] = {}
        self._priorities: list[int] = []
        # By the arrival of the first one, the lines in turn of all priorities.
        self._heads: list[tuple[int, Line]] = []
        self._planned: dict[Claimant, Line] = {}
        # Priorities whose lines may be in or out of turn and not know it.
        self._unheard: set[int] = set()
        # Priorities for which several tenants wait.
        self._several = 0
        self._held_out_of_turn = 0
        self._now_s = 0.0

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant waits in one line of priority."""
        return self._several > 0

    @property
    def waiting_priorities(self) -> int:
        """How many priorities have somebody unplanned."""
        return len(self._priorities)

    @property
    def held_out_of_turn(self) -> int:
        """Of those that the policy would be said to hold, how many wait for other tenants."""
        self._hear()
        return self._held_out_of_turn

    def at(self, now_s: float) -> None:
        """What follows happens then."""
        self._now_s = now_s

    def waits(self, member: Member) -> None:
        """It has come, or was preempted."""
        whose = _whose(member)
        line = self._lines.get(whose)
        if line is None:
            line = self._lines[whose] = Line(whose=whose)
            self._shares.comes(whose)
            self._several += self._shares.count(whose.priority) == 2
        self._take(line)
        member.standing, member.out_of_turn_s = line, 0.0
        line.part = member.tenant.part
        line.add(member)
        self._put(line)

    def planned(self, member: Member) -> None:
        """It will join, unless `settled` comes first."""
        line = self._lines[_whose(member)]
        self._take(line)
        line.remove(member)
        line.planned[member.request_id] = member
        line.planned_tokens += _tokens(member) / member.tenant.part
        self._planned[line.whose] = line
        self._put(line)

    def joined(self, member: Member) -> None:
        """One that waits; it `left` besides."""
        line = self._lines[_whose(member)]
        self._take(line)
        self._shares.begins(line.whose, _tokens(member), member.tenant.part)
        self._put(line)

    def left(self, member: Member) -> None:
        """It waits no more, whatever became of it."""
        line = self._lines[_whose(member)]
        self._take(line)
        if not line.remove(member):
            del line.planned[member.request_id]
        if line.members or line.planned:
            self._put(line)
            return
        self._stand(line, is_in_turn=True)
        self._planned.pop(line.whose, None)
        del self._lines[line.whose]
        self._shares.leaves(line.whose)
        self._several -= self._shares.count(line.whose.priority) == 1

    def settled(self) -> None:
        """Nobody is planned any more."""
        for line in self._planned.values():
            self._take(line)
            for member in line.planned.values():
                line.add(member)
            line.planned.clear()
            line.planned_tokens = 0.0
            self._put(line)
        self._planned.clear()
        self._hear()

    def held(self, member: Member) -> None:
        """From now on its waiting is the policy's doing, but for the time out of turn."""
        if member.standing is not None:
            member.out_of_turn_s = -member.standing.out_until(self._now_s)
            member.standing.held += 1
            self._held_out_of_turn += not member.standing.is_in_turn

    def held_no_more(self, member: Member) -> None:
        """One that was held."""
        if member.standing is not None:
            member.out_of_turn_s += member.standing.out_until(self._now_s)
            member.standing.held -= 1
            self._held_out_of_turn -= not member.standing.is_in_turn

    def is_in_turn(self, member: Member) -> bool:
        """Whether a policy may choose this one of those that wait."""
        self._hear()
        return self._lines[_whose(member)].is_in_turn

    def in_turn(self) -> Iterator[Member]:
        """Those unplanned, of all priorities, by arrival; until something changes."""
        self._hear()
        return merged(self._heads)

    def first(self) -> Member:
        """Of the lowest priority number the one unplanned that came first, in turn or not."""
        return self._of_priority[self._priorities[0]].by_arrival[0][1].members[0]

    def furthest_behind(self, priority: int) -> Member:
        """The first of the tenant furthest behind. KeyError where nobody of that priority waits unplanned."""
        return self._of_priority[priority].furthest_behind().members[0]

    def check_invariants(self) -> None:
        self._shares.check_invariants()
        self._hear()
        lines = self._lines.values()
        assert self._shares.here == self._lines.keys(), "somebody has a share and does not wait"
        assert all(line.members or line.planned for line in lines), "a line of nobody"
        assert {line.whose for line in lines if line.planned} <= self._planned.keys(), "somebody stays planned"
        shown = {line.whose for line in lines if line.members}
        assert self._priorities == sorted({whose.priority for whose in shown}) == sorted(self._of_priority)
        assert self._held_out_of_turn == sum(line.held for line in lines if not line.is_in_turn)
        for priority, order in self._of_priority.items():
            here = [self._lines[whose] for whose in shown if whose.priority == priority]
            behind = min(self._shares.start(line.whose) + line.planned_tokens for line in here)
            assert behind == order.furthest_behind().place, "the one furthest behind is another one"
            assert all(line.is_in_turn == (line.edge <= behind) for line in here), "a line does not know its turn"
        assert self._heads == sorted((line.first, line) for line in lines if line.members and line.is_in_turn)

    def _take(self, line: Line) -> None:
        """Out of the lists, while it changes."""
        if not line.members:
            return
        priority = line.whose.priority
        order = self._of_priority[priority]
        order.take(line)
        if line.is_in_turn:
            del self._heads[bisect_left(self._heads, (line.first,))]
        if order:
            self._unheard.add(priority)
        else:
            del self._of_priority[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
            self._unheard.discard(priority)

    def _put(self, line: Line) -> None:
        if not line.members:
            return
        priority = line.whose.priority
        if priority not in self._of_priority:
            self._of_priority[priority] = Lines()
            insort(self._priorities, priority)
        line.place = self._shares.start(line.whose) + line.planned_tokens
        line.edge = line.place - self._slack_tokens / line.part
        is_in_turn = self._of_priority[priority].put(line)
        self._stand(line, is_in_turn=is_in_turn)
        if is_in_turn:
            insort(self._heads, (line.first, line))
        self._unheard.add(priority)

    def _hear(self) -> None:
        """Lines learn whether they are in turn."""
        while self._unheard:
            came, went = self._of_priority[self._unheard.pop()].heard()
            for line in came:
                self._stand(line, is_in_turn=True)
                insort(self._heads, (line.first, line))
            for line in went:
                self._stand(line, is_in_turn=False)
                del self._heads[bisect_left(self._heads, (line.first,))]

    def _stand(self, line: Line, *, is_in_turn: bool) -> None:
        if is_in_turn is not line.is_in_turn:
            self._held_out_of_turn += -line.held if is_in_turn else line.held
            line.turn(self._now_s)


def _whose(member: Member) -> Claimant:
    return Claimant(member.priority, member.tenant.tenant_id)


def _tokens(member: Member) -> int:
    return max(member.tokens, LEAST_TOKENS)
