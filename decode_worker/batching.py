"""Who joins the decode batch next, in which order, and when the batch stays as it is: the pure core of the scheduler.

Source: FEATHER Algorithm 7, as corrected in the project's notes: the batch carries over from step to step, and is never
left empty while somebody waits. What is ours:

Turns. A request's turn comes when as many have left the queue as arrived before it, or when a place stays free although
it waits: from then on the policy holds it, not the load. After nine tenths of `wait_bound_s`, or half of the time to
its deadline, it is overdue: it gets the next place that is free, before others, whatever it shares.

Cohorts. The tree's working set is the cohort: requests admitted since one of them took the lead. When another prefix
has been held for its share of the bound, the one whose turn came first takes the lead: the cohort before decodes on but
attracts nobody any more, so the batch turns from one prefix to the next as places become free, instead of mixing all of
them. Who is overdue and would spoil the tip joins as a guest, outside the cohort.

Prefixes on their way. A request whose prefix another one is pulling waits for it: then it shares the blocks.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from math import inf

from decode_worker.batch_members import BatchingCounters, Cause, FormerLead, Joining, Member, Plan, Reason
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.chunked_hash_tree import Candidate, ChunkedHashTree, common_chunks
from decode_worker.stop_policies import Action, BatchState, Decision, StopPolicy

# Of the requests that wait longest, how many are looked at when somebody has to take the lead.
_LEADS = 16
# Entries of due times that may be kept beyond twice those that wait.
_SLACK = 64
# Of the bound, after which a request is overdue: it still needs a place that is free.
_DUE_SHARE = 0.9


class Batching:
    """is_resident: whether the KV of the chunk with this hash lies on the device."""

    def __init__(
        self, policy: StopPolicy, wait_bound_s: float, is_resident: Callable[[ChunkHash], bool] = lambda chunk: True
    ) -> None:
        self.policy = policy
        self.tree = ChunkedHashTree()
        self.counters = BatchingCounters()
        self._wait_bound_s = wait_bound_s
        self._is_resident = is_resident
        # In order of arrival; who was preempted stands in front. Those planned are in it until `settle`.
        self._waiting: OrderedDict[str, Member] = OrderedDict()
        self._planned: set[str] = set()
        self._batch: dict[str, Member] = {}
        self._loading: dict[str, Member] = {}
        self._priorities: Counter[int] = Counter()
        self._before_turn: deque[Member] = deque()
        self._held: set[str] = set()
        # By due time; those overdue, by priority; and those of them that `settle` has to put back. Entries count while
        # their member waits and has that due time.
        self._due: list[tuple[float, int, Member]] = []
        self._late: list[tuple[int, float, int, Member]] = []
        self._late_but_planned: list[tuple[int, float, int, Member]] = []
        self._for_prefix: Member | None = None
        self._waiting_priorities: Counter[int] = Counter()
        self._arrivals = 0
        self._departures = 0
        self._lead_s = -inf
        # Before that nobody can have been held for too long; and whether somebody new may bring more.
        self._lead_until_s = -inf
        self._changed = True
        self._by_arrival = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._batch

    def waits(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def loading_requests(self) -> int:
        return len(self._loading)

    def waiting(self) -> Iterator[Member]:
        """In order of arrival."""
        return iter(self._waiting.values())

    def batch(self) -> Iterator[Member]:
        """Running and loading, of every cohort, guests too; in the order in which they joined."""
        return iter(self._batch.values())

    def waiting_by_cause(self) -> dict[Cause, int]:
        waits = self._for_prefix
        prefix, held = int(waits is not None), len(self._held) - (waits is not None and waits.request_id in self._held)
        return {Cause.CAPACITY: len(self._waiting) - held - prefix, Cause.HELD: held, Cause.PREFIX: prefix}

    def insert(
        self,
        request_id: str,
        hashes: Sequence[ChunkHash],
        now_s: float,
        priority: int = 0,
        deadline_s: float | None = None,
        *,
        pulls: bool = False,
    ) -> None:
        """A request waits. deadline_s: when nobody wants its answer any more. Raises ValueError for an id that is
        known."""
        if request_id in self:
            raise ValueError(f"request {request_id} is known already")
        self.tree.insert(request_id, hashes, priority, self._arrivals)
        member = Member(request_id, hashes, priority, self._arrivals, now_s, pulls=pulls)
        self._arrivals += 1
        self._waiting[request_id] = member
        self._waiting_priorities[priority] += 1
        self._before_turn.append(member)
        self._changed = True
        if deadline_s is not None:
            self._set_due(member, now_s + max(0.0, deadline_s - now_s) / 2)

    def plan(self, now_s: float, places: int, *, by_arrival: bool = False) -> Plan:
        """Who joins now; at most `places`. `settle` has to follow.

        by_arrival: in the order of priority and arrival, whatever is shared.
        """
        self._stop_waiting_for_prefix(now_s)
        if by_arrival is not self._by_arrival:
            self._by_arrival = by_arrival
            self.tree.finish_all()
        plan = Plan(places)
        first = self._first_by_arrival(places) if by_arrival else iter(())
        while len(plan.joining) < places and len(plan.joining) < len(self._waiting):
            joining = Joining(next(first), Reason.FCFS) if by_arrival else self._next(plan, now_s)
            if joining is None:
                break
            name = joining.member.request_id
            self._planned.add(name)
            if joining.guest:
                self.tree.remove(name)
            else:
                self.tree.add_to_batch(name)
            plan.joining.append(joining)
        return plan

    def settle(self, plan: Plan, admitted: Collection[str], loading: Collection[str], now_s: float) -> None:
        """What came of a plan: who was not admitted waits again. loading: of the admitted, whose KV is being pulled."""
        for each in plan.joining:
            member = each.member
            self._planned.discard(member.request_id)
            if self._waiting.get(member.request_id) is not member:
                # Cancelled since.
                continue
            if member.request_id in admitted:
                self._join(each, now_s)
            else:
                self._return_to_tree(member)
                member.refused_s = min(member.refused_s, now_s)
                self._held.discard(member.request_id)
        self._loading.update((name, self._batch[name]) for name in loading)
        if plan.former is not None and plan.former.lead.request_id not in admitted:
            self._restore(plan.former)
        for late in self._late_but_planned:
            heapq.heappush(self._late, late)
        self._late_but_planned.clear()
        # Who was refused found no memory: nobody else would have.
        all_joined = len(admitted) == len(plan.joining)
        self._give_turns(plan.places - len(plan.joining) if all_joined else 0, now_s)

    def loaded(self, request_id: str) -> None:
        """A pull has ended, one way or the other."""
        self._loading.pop(request_id, None)

    def loading(self) -> list[str]:
        return list(self._loading)

    def preempted(self, request_id: str, now_s: float) -> None:
        """A member of the batch waits again, and goes before others. Raises KeyError for who is not in the batch."""
        self._changed = True
        member = self._leave_batch(request_id)
        member.arrived_s, member.prefix_s = now_s, 0.0
        self._return_to_tree(member)
        self._waiting[request_id] = member
        self._waiting.move_to_end(request_id, last=False)
        self._waiting_priorities[member.priority] += 1
        self._departures -= 1
        member.turn_s = member.refused_s = now_s
        self._set_due(member, now_s)

    def gone(self, request_id: str) -> bool:
        """A request has finished or was cancelled, wherever it was. False: it was not known."""
        self._changed = True
        if request_id in self._batch:
            self._leave_batch(request_id)
        elif request_id in self._waiting:
            self._leave_queue(self._waiting[request_id])
        else:
            return False
        self.tree.discard(request_id)
        return True

    # Who is next.

    def _first_by_arrival(self, most: int) -> Iterator[Member]:
        if len(self._waiting_priorities) <= 1:
            return islice(self._waiting.values(), most)
        return iter(heapq.nsmallest(most, self._waiting.values(), key=lambda each: each.priority))

    def _next(self, plan: Plan, now_s: float) -> Joining | None:
        """None: the batch stays as it is."""
        best = self.tree.find_best()
        if best is None:
            return None
        member, overdue = self._waiting[best.request_id], self._overdue(now_s)
        if overdue is not None and overdue.priority <= member.priority:
            return self._overdue_joins(overdue, plan, now_s)
        joining = self._chosen(best, member, plan, now_s)
        if joining is None and overdue is not None:
            # More urgent ones stay out: nobody else wants the place.
            plan.stop = None
            return self._overdue_joins(overdue, plan, now_s)
        return joining

    def _chosen(self, best: Candidate, member: Member, plan: Plan, now_s: float) -> Joining | None:
        size = len(self._batch) + len(plan.joining)
        if not self.tree.active_requests:
            first = self._new_lead(member.priority)
            if not self._waits_for_prefix(first, plan):
                return self._takes_lead(first, plan, now_s, Reason.TURN if size else Reason.IDLE)
            return self._waits(first, plan, now_s)
        lead = self._held_too_long(member.priority, now_s) or self._brings_more(member.priority)
        if lead is not None and not self._waits_for_prefix(lead, plan):
            return self._takes_lead(lead, plan, now_s, Reason.TURN)
        if self._waits_for_prefix(member, plan):
            return self._waits(member, plan, now_s)
        loss = self._loss(best)
        if member.priority < min(self._priorities, default=member.priority):
            return Joining(member, Reason.PRIORITY, loss)
        state = BatchState(size, loss, best.peers)
        decision = Decision(state, self.policy.decide(state))
        self.counters.decisions += 1
        if decision.action is Action.STOP:
            plan.stop = decision
            return None
        return Joining(member, Reason.POLICY, loss, decision)

    def _waits(self, member: Member, plan: Plan, now_s: float) -> Joining | None:
        """For a prefix on its way. Where nothing runs meanwhile, one that need not wait joins as a guest."""
        self._for_prefix = member
        member.prefix_since_s = now_s
        if len(self._batch) > len(self._loading) or plan.joining or len(self._loading) > 1:
            return None
        others = (each for each in self._longest() if not self._waits_for_prefix(each, plan))
        other = next(others, None)
        return Joining(other, Reason.IDLE, guest=True) if other is not None else None

    def _overdue_joins(self, member: Member, plan: Plan, now_s: float) -> Joining:
        if not self.tree.active_requests:
            return self._takes_lead(member, plan, now_s, Reason.OVERDUE)
        candidate = self.tree.candidate(member.request_id)
        guest = 2 * candidate.tip_after < self._tip_chunks()
        return Joining(member, Reason.OVERDUE, 0 if guest else self._loss(candidate), guest=guest)

    def _takes_lead(self, member: Member, plan: Plan, now_s: float, reason: Reason) -> Joining:
        former = FormerLead(member, self.tree.finish_all(), self._lead_s, self._lead_until_s)
        plan.former = plan.former or former
        self._lead_s = now_s
        self._lead_until_s = now_s + self._wait_bound_s / (_LEADS + 1)
        return Joining(member, reason)

    def _new_lead(self, priority: int) -> Member:
        """Where nobody leads: of those that wait longest one whose prefix is on the device, then who brings most."""
        urgent = [each for each in self._longest() if each.priority == priority]
        if not urgent:
            return next(each for each in self._unplanned() if each.priority == priority)
        return max(urgent, key=self._worth)

    def _held_too_long(self, priority: int, now_s: float) -> Member | None:
        """Who takes the lead because its prefix was held for its share of the bound: the bound by all prefixes."""
        if now_s < self._lead_until_s:
            return None
        tip = self._tip_chunks()
        others = [
            each
            for each in self._longest()
            if each.turn_s < inf and each.priority <= priority and self.tree.shared_chunks(each.request_id) < tip
        ]
        prefixes = 1 + len({self.tree.branch(each.request_id) for each in others})
        if others and now_s - self._lead_s >= self._wait_bound_s / prefixes:
            return others[0]
        least_s = self._wait_bound_s / (_LEADS + 1)
        self._lead_until_s = self._lead_s + self._wait_bound_s / prefixes if others else now_s + least_s
        return None

    def _brings_more(self, priority: int) -> Member | None:
        """Who takes the lead because the cohort has hardly a prefix left, while others that wait have a long one."""
        if not self._changed:
            return None
        self._changed = False
        leads = [each for each in self._longest() if each.priority == priority]
        lead = max(leads, key=self._worth, default=None)
        brings = self.tree.potential(lead.request_id)[1] if lead is not None else 0
        return lead if 2 * brings > 3 * self.tree.tip_chunks else None

    def _worth(self, member: Member) -> tuple[bool, int]:
        resident = bool(member.hashes) and self._is_resident(member.hashes[0])
        return resident, self.tree.potential(member.request_id)[0]

    def _waits_for_prefix(self, member: Member, plan: Plan) -> bool:
        """Whether somebody pulls, or is about to, what it would share: then it need not be pulled twice."""
        pulling = [*self._loading.values(), *(each.member for each in plan.joining if each.member.pulls)]
        shared = max((common_chunks(member.hashes, each.hashes) for each in pulling), default=0)
        return shared > 0 and not self._is_resident(member.hashes[shared - 1])

    def _loss(self, candidate: Candidate) -> int:
        return max(0, self._tip_chunks() - candidate.tip_after)

    def _tip_chunks(self) -> int:
        """What there is to lose. Of a cohort of one, what it has of its own nobody could keep."""
        return self.tree.wanted_tip_chunks if self.tree.active_requests == 1 else self.tree.tip_chunks

    def _overdue(self, now_s: float) -> Member | None:
        """Of the most urgent priority the one that was due first."""
        while self._due and self._due[0][0] <= now_s:
            due = heapq.heappop(self._due)
            heapq.heappush(self._late, (due[2].priority, *due))
        while self._late:
            _, due_s, _, member = self._late[0]
            if self._waiting.get(member.request_id) is member and due_s == member.due_s:
                if member.request_id not in self._planned:
                    return member
                self._late_but_planned.append(self._late[0])
            heapq.heappop(self._late)
        return None

    def _unplanned(self) -> Iterator[Member]:
        return (each for each in self._waiting.values() if each.request_id not in self._planned)

    def _longest(self) -> Iterator[Member]:
        return islice(self._unplanned(), _LEADS)

    # The books.

    def _restore(self, former: FormerLead) -> None:
        """The lead found no memory: the cohort before goes on, with those who joined meanwhile."""
        self._lead_s, self._lead_until_s = former.lead_s, former.lead_until_s
        for name in former.cohort:
            member = self._batch.get(name)
            if member is not None and name not in self.tree:
                self.tree.insert(name, member.hashes, member.priority, member.arrival)
                self.tree.add_to_batch(name)

    def _join(self, joining: Joining, now_s: float) -> None:
        self._changed = True
        member, counters = joining.member, self.counters
        held_s = max(0.0, min(now_s, member.refused_s) - member.turn_s - member.prefix_s)
        counters.wait_s[Cause.PREFIX] += member.prefix_s
        counters.wait_s[Cause.HELD] += held_s
        counters.wait_s[Cause.CAPACITY] += max(0.0, now_s - member.arrived_s - held_s - member.prefix_s)
        counters.longest_held_s = max(counters.longest_held_s, held_s)
        counters.recently_held_s.append(held_s)
        counters.admissions[joining.reason] += 1
        counters.lost_chunks += joining.loss_chunks
        self._leave_queue(member)
        self._batch[member.request_id] = member
        self._priorities[member.priority] += 1

    def _leave_queue(self, member: Member) -> None:
        del self._waiting[member.request_id]
        self._held.discard(member.request_id)
        if self._for_prefix is member:
            self._for_prefix = None
        _count_down(self._waiting_priorities, member.priority)
        self._departures += 1

    def _leave_batch(self, request_id: str) -> Member:
        member = self._batch.pop(request_id)
        self._loading.pop(request_id, None)
        _count_down(self._priorities, member.priority)
        return member

    def _return_to_tree(self, member: Member) -> None:
        """To those that wait there. Who is of an earlier cohort, or a guest, is not in the tree."""
        if self.tree.is_active(member.request_id):
            self.tree.preempt(member.request_id)
        else:
            self.tree.insert(member.request_id, member.hashes, member.priority, member.arrival)

    def _stop_waiting_for_prefix(self, now_s: float) -> None:
        member = self._for_prefix
        if member is not None and member.prefix_since_s is not None:
            member.prefix_s += now_s - member.prefix_since_s
            member.prefix_since_s = None
        self._for_prefix = None

    def _give_turns(self, free_places: int, now_s: float) -> None:
        reached = self._departures + free_places
        while self._before_turn and self._before_turn[0].arrival < reached:
            member = self._before_turn.popleft()
            if self._waiting.get(member.request_id) is member:
                self._give_turn(member, now_s)

    def _give_turn(self, member: Member, now_s: float) -> None:
        member.turn_s = now_s
        if member.refused_s == inf:
            self._held.add(member.request_id)
        if now_s + _DUE_SHARE * self._wait_bound_s < member.due_s:
            self._set_due(member, now_s + _DUE_SHARE * self._wait_bound_s)

    def _set_due(self, member: Member, due_s: float) -> None:
        member.due_s = due_s
        heapq.heappush(self._due, (due_s, member.arrival, member))
        if len(self._due) + len(self._late) > 2 * len(self._waiting) + _SLACK:
            self._due = [(each.due_s, each.arrival, each) for each in self._waiting.values() if each.due_s < inf]
            heapq.heapify(self._due)
            self._late = []


def _count_down(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
