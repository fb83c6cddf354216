"""Turns of those that wait: from when on a request is held by the policy and not by the load, and when it is overdue.

A request's turn comes when as many have left the queue as arrived before it, or when a place stays free although it
waits. After nine tenths of `wait_bound_s` from then on, or half of the time to its deadline, it is overdue.
Decision 0022 says why.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping
from math import inf

from decode_worker.batch_members import Member

# Entries of due times that may be kept beyond twice those that wait.
SLACK = 64
# Of the bound, after which a request is overdue: it still needs a place that is free.
DUE_SHARE = 0.9


class Turns:
    """waiting: the queue, by request id; its owner is the caller. on_held, on_release: told of those `held`."""

    def __init__(
        self,
        waiting: Mapping[str, Member],
        wait_bound_s: float,
        on_held: Callable[[Member], None] = lambda member: None,
        on_release: Callable[[Member], None] = lambda member: None,
    ) -> None:
        # Of those that wait, the ones whose turn has come and which were not refused.
        self.held: set[str] = set()
        self._waiting = waiting
        self._wait_bound_s = wait_bound_s
        self._on_held = on_held
        self._on_release = on_release
        # In order of arrival; entries count while their member waits.
        self._before_turn: deque[Member] = deque()
        # By due time; those overdue, by priority; and those of them that `put_back` puts back. Entries count while
        # their member waits and has that due time.
        self._due: list[tuple[float, int, Member]] = []
        self._late: list[tuple[int, float, int, Member]] = []
        self._late_but_planned: list[tuple[int, float, int, Member]] = []
        self._departures = 0

    @property
    def due_times(self) -> int:
        """Entries kept: with each new one at most `SLACK` beyond twice those that wait."""
        return len(self._due) + len(self._late)

    @property
    def before_turn(self) -> int:
        """Requests whose turn has not come; of those that are gone the ones behind a request that waits count, too."""
        return len(self._before_turn)

    def arrived(self, member: Member, now_s: float, deadline_s: float | None) -> None:
        self._before_turn.append(member)
        if deadline_s is not None:
            self._set_due(member, now_s + max(0.0, deadline_s - now_s) / 2)

    def left(self, member: Member) -> None:
        """A request waits no more, whatever became of it."""
        self._release(member)
        self._departures += 1

    def returned(self, member: Member, now_s: float) -> None:
        """A preempted request waits again: it is overdue at once, and for memory alone."""
        self._departures -= 1
        member.turn_s = member.refused_s = now_s
        self._set_due(member, now_s)

    def refused(self, member: Member, now_s: float) -> None:
        """A request that was chosen found no memory."""
        member.refused_s = min(member.refused_s, now_s)
        self._release(member)

    def overdue(self, now_s: float, planned: Collection[str]) -> Member | None:
        """Of the most urgent priority the one that was due first; not one of those `planned` already."""
        while self._due and self._due[0][0] <= now_s:
            due = heapq.heappop(self._due)
            heapq.heappush(self._late, (due[2].priority, *due))
        while self._late:
            _, due_s, _, member = self._late[0]
            if self._waiting.get(member.request_id) is member and due_s == member.due_s:
                if member.request_id not in planned:
                    return member
                self._late_but_planned.append(self._late[0])
            heapq.heappop(self._late)
        return None

    def put_back(self) -> None:
        """The plan is settled: a planned request that still waits is overdue as before."""
        for late in self._late_but_planned:
            heapq.heappush(self._late, late)
        self._late_but_planned.clear()

    def give(self, free_places: int, now_s: float) -> None:
        """So many places stay free although requests wait."""
        reached = self._departures + free_places
        while self._before_turn and self._before_turn[0].arrival < reached:
            member = self._before_turn.popleft()
            if self._waiting.get(member.request_id) is member:
                self._give_turn(member, now_s)

    def _give_turn(self, member: Member, now_s: float) -> None:
        member.turn_s = now_s
        if member.refused_s == inf:
            self.held.add(member.request_id)
            self._on_held(member)
        if now_s + DUE_SHARE * self._wait_bound_s < member.due_s:
            self._set_due(member, now_s + DUE_SHARE * self._wait_bound_s)

    def _release(self, member: Member) -> None:
        if member.request_id in self.held:
            self.held.remove(member.request_id)
            self._on_release(member)

    def _set_due(self, member: Member, due_s: float) -> None:
        member.due_s = due_s
        heapq.heappush(self._due, (due_s, member.arrival, member))
        if len(self._due) + len(self._late) > 2 * len(self._waiting) + SLACK:
            self._due = [(each.due_s, each.arrival, each) for each in self._waiting.values() if each.due_s < inf]
            heapq.heapify(self._due)
            self._late = []
