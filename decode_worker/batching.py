"""Which request joins the decode batch next, and when the batch stays as it is: the pure core of the scheduler.

Source: FEATHER Algorithm 7, as decision 0022 corrects it: the batch carries over from step to step, and is never left
empty while a request waits. What is ours:

Turns (`decode_worker.turns`). An overdue request gets the next place that is free, whatever it shares.

Cohorts. The tree's working set is the cohort: requests admitted since one of them took the lead. When another prefix
has been held for its share of the bound, the one whose turn came first takes the lead: the cohort before decodes on but
attracts no request any more, so the batch turns from one prefix to the next as places become free, instead of mixing
all of them. An overdue request that would spoil the tip joins outside the cohort.

Shares (`decode_worker.batch_shares`). Of several tenants none gets far ahead, whatever its requests share.

Prefixes on their way. A request whose prefix another one is pulling waits for it: then it shares the blocks.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from math import inf

from cluster_core.engine_jobs import NOBODY, TenantShare
from decode_worker.batch_members import BatchingCounters, Cause, FormerLead, Joining, Member, Plan, Reason
from decode_worker.batch_shares import SLACK_TOKENS, BatchShares
from decode_worker.chunk_hashes import ChunkHash, common_chunks
from decode_worker.chunked_hash_tree import Candidate, ChunkedHashTree
from decode_worker.stop_policies import Action, BatchState, Decision, StopPolicy
from decode_worker.turns import Turns

# Of the requests that wait longest, how many are looked at when one has to take the lead.
_LEADS = 16


class Batching:
    """is_resident: whether the KV of the chunk with this hash lies on the device."""

    def __init__(
        self,
        policy: StopPolicy,
        wait_bound_s: float,
        is_resident: Callable[[ChunkHash], bool] = lambda chunk: True,
        slack_tokens: int = SLACK_TOKENS,
    ) -> None:
        self.policy = policy
        self.tree = ChunkedHashTree()
        self.counters = BatchingCounters()
        self._wait_bound_s = wait_bound_s
        self._is_resident = is_resident
        # In order of arrival; a preempted request stands in front. Those planned are in it until `settle`.
        self._waiting: OrderedDict[str, Member] = OrderedDict()
        self._planned: set[str] = set()
        self._batch: dict[str, Member] = {}
        self._loading: dict[str, Member] = {}
        self._priorities: Counter[int] = Counter()
        self.shares = BatchShares(slack_tokens)
        self.turns = Turns(self._waiting, wait_bound_s, self.shares.held, self.shares.held_no_more)
        # The one that waits for a prefix on its way, since the last plan.
        self._for_prefix: Member | None = None
        self._arrivals = 0
        self._lead_s = -inf
        # Before that no request can have been held for too long.
        self._lead_until_s = -inf
        # Whether a request may have come that brings more.
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
        """Running and loading, of every cohort and of none; in the order in which they joined."""
        return iter(self._batch.values())

    def waiting_by_cause(self) -> dict[Cause, int]:
        share, held, one = self.shares.held_out_of_turn, self.turns.held, self._for_prefix
        number = dict.fromkeys(Cause, 0)
        number |= {Cause.CAPACITY: len(self._waiting) - len(held), Cause.HELD: len(held) - share, Cause.SHARE: share}
        if one is not None:
            number[one.held_by] -= 1
            number[Cause.PREFIX] = 1
        return number

    def insert(
        self,
        request_id: str,
        hashes: Sequence[ChunkHash],
        now_s: float,
        priority: int = 0,
        deadline_s: float | None = None,
        *,
        pulls: bool = False,
        tokens: int = 0,
        tenant: TenantShare = NOBODY,
    ) -> None:
        """A request waits. deadline_s: then nobody wants its answer. tokens: of its prompt. ValueError: a known id."""
        if request_id in self:
            raise ValueError(f"request {request_id} is known already")
        self.tree.insert(request_id, hashes, priority, self._arrivals)
        member = Member(request_id, hashes, priority, self._arrivals, now_s, pulls=pulls, tokens=tokens, tenant=tenant)
        self._arrivals += 1
        self._waiting[request_id] = member
        self._changed = True
        self.turns.arrived(member, now_s, deadline_s)
        self.shares.waits(member)

    def plan(self, now_s: float, places: int, *, by_arrival: bool = False) -> Plan:
        """Which requests join now; at most `places`. `settle` has to follow.

        by_arrival: in the order of priority and arrival, whatever prefix is shared.
        """
        self.shares.at(now_s)
        if self._for_prefix is not None:
            self._for_prefix.waits_for_prefix_no_more(now_s)
            self._for_prefix = None
        if by_arrival is not self._by_arrival:
            self._by_arrival = by_arrival
            self.tree.finish_all()
        plan = Plan(places)
        first = self._first_by_arrival(places) if by_arrival and not self.shares.are_several else None
        while len(plan.joining) < places and len(plan.joining) < len(self._waiting):
            joining = self._next_by_arrival(first) if by_arrival else self._next(plan, now_s)
            if joining is None:
                break
            name = joining.member.request_id
            self._planned.add(name)
            self.shares.planned(joining.member)
            if joining.joins_cohort:
                self.tree.add_to_batch(name)
            else:
                self.tree.remove(name)
            plan.joining.append(joining)
        return plan

    def settle(self, plan: Plan, admitted: Collection[str], loading: Collection[str], now_s: float) -> None:
        """What came of a plan: the others of it wait again. loading: of the admitted those whose KV is pulled."""
        self.shares.at(now_s)
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
                self.turns.refused(member, now_s)
        self.shares.settled()
        self._loading.update((name, self._batch[name]) for name in loading)
        if plan.former is not None and plan.former.lead.request_id not in admitted:
            self._restore(plan.former)
        self.turns.put_back()
        # A refused request found no memory: no other would have.
        all_joined = len(admitted) == len(plan.joining)
        self.turns.give(plan.places - len(plan.joining) if all_joined else 0, now_s)

    def loaded(self, request_id: str) -> None:
        """A pull has ended, one way or the other."""
        self._loading.pop(request_id, None)

    def loading(self) -> list[str]:
        return list(self._loading)

    def preempted(self, request_id: str, now_s: float) -> None:
        """A member of the batch waits again, before others. Raises KeyError for a request that is not in the batch."""
        self._changed = True
        member = self._leave_batch(request_id)
        member.arrived_s, member.prefix_s = now_s, 0.0
        self._return_to_tree(member)
        self._waiting[request_id] = member
        self._waiting.move_to_end(request_id, last=False)
        self.turns.returned(member, now_s)
        self.shares.waits(member)

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

    # Which is next.

    def _first_by_arrival(self, most: int) -> Iterator[Member]:
        if self.shares.waiting_priorities <= 1:
            return islice(self._waiting.values(), most)
        return iter(heapq.nsmallest(most, self._waiting.values(), key=lambda each: each.priority))

    def _next_by_arrival(self, first: Iterator[Member] | None) -> Joining:
        """first: by priority and arrival; None: several tenants wait."""
        if first is not None:
            return Joining(next(first), Reason.FCFS)
        member = self.shares.first()
        if self.shares.is_in_turn(member):
            return Joining(member, Reason.FCFS)
        return Joining(self.shares.furthest_behind(member.priority), Reason.SHARE)

    def _next(self, plan: Plan, now_s: float) -> Joining | None:
        """None: the batch stays as it is."""
        best = self.tree.find_best()
        if best is None:
            return None
        member, overdue = self._waiting[best.request_id], self._overdue(now_s)
        if overdue is not None and overdue.priority <= member.priority:
            return self._joins_anyway(overdue, plan, now_s, Reason.OVERDUE)
        if self.shares.is_in_turn(member):
            joining = self._chosen(best, member, plan, now_s, Reason.POLICY)
        else:
            best = self._best_in_turn(member.priority)
            joining = self._chosen(best, self._waiting[best.request_id], plan, now_s, Reason.SHARE)
        if joining is None and overdue is not None:
            # More urgent ones stay out: no other request wants the place.
            plan.stop = None
            return self._joins_anyway(overdue, plan, now_s, Reason.OVERDUE)
        return joining

    def _overdue(self, now_s: float) -> Member | None:
        """In turn: where the first one is not, one of those in turn that wait longest."""
        first = self.turns.overdue(now_s, self._planned)
        if first is None or self.shares.is_in_turn(first):
            return first
        overdue = (each for each in self._longest() if each.due_s <= now_s)
        return min(overdue, key=lambda each: (each.priority, each.due_s), default=None)

    def _best_in_turn(self, priority: int) -> Candidate:
        """Of those in turn that wait longest the one that shares most."""
        longest = [each for each in self._longest() if each.priority == priority]
        candidates = map(self.tree.candidate, [each.request_id for each in longest])
        behind = self.tree.candidate(self.shares.furthest_behind(priority).request_id)
        return min(candidates, key=lambda each: each.missing_chunks, default=behind)

    def _chosen(self, best: Candidate, member: Member, plan: Plan, now_s: float, reason: Reason) -> Joining | None:
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
        return Joining(member, reason, loss, decision)

    def _waits(self, member: Member, plan: Plan, now_s: float) -> Joining | None:
        """For a prefix on its way. Where nothing runs meanwhile, one that need not wait joins outside the cohort."""
        self._for_prefix = member
        member.prefix_since_s = now_s
        if len(self._batch) > len(self._loading) or plan.joining or len(self._loading) > 1:
            return None
        other = next((each for each in self._longest() if not self._waits_for_prefix(each, plan)), None)
        return Joining(other, Reason.IDLE, joins_cohort=False) if other is not None else None

    def _joins_anyway(self, member: Member, plan: Plan, now_s: float, reason: Reason) -> Joining:
        """Whatever it shares; where it would spoil the tip, outside the cohort."""
        if not self.tree.active_requests:
            return self._takes_lead(member, plan, now_s, reason)
        candidate = self.tree.candidate(member.request_id)
        if 2 * candidate.tip_after < self._tip_chunks():
            return Joining(member, reason, joins_cohort=False)
        return Joining(member, reason, self._loss(candidate))

    def _takes_lead(self, member: Member, plan: Plan, now_s: float, reason: Reason) -> Joining:
        former = FormerLead(member, self.tree.finish_all(), self._lead_s, self._lead_until_s)
        plan.former = plan.former or former
        self._lead_s = now_s
        self._lead_until_s = now_s + self._wait_bound_s / (_LEADS + 1)
        return Joining(member, reason)

    def _new_lead(self, priority: int) -> Member:
        """Of those that wait longest one whose prefix is on the device, then the one that brings most."""
        urgent = [each for each in self._longest() if each.priority == priority]
        return max(urgent, key=self._worth) if urgent else self.shares.furthest_behind(priority)

    def _held_too_long(self, priority: int, now_s: float) -> Member | None:
        """One takes the lead because its prefix was held for its share of the bound: the bound by all prefixes."""
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
        """One takes the lead because the cohort has hardly a prefix left, while others that wait have a long one."""
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
        """Whether another pulls, or is about to, what it would share: then it need not be pulled twice."""
        pulling = [*self._loading.values(), *(each.member for each in plan.joining if each.member.pulls)]
        shared = max((common_chunks(member.hashes, each.hashes) for each in pulling), default=0)
        return shared > 0 and not self._is_resident(member.hashes[shared - 1])

    def _loss(self, candidate: Candidate) -> int:
        return max(0, self._tip_chunks() - candidate.tip_after)

    def _tip_chunks(self) -> int:
        """What there is to lose. Of a cohort of one, what it has of its own is lost in any case."""
        return self.tree.wanted_tip_chunks if self.tree.active_requests == 1 else self.tree.tip_chunks

    def _unplanned(self) -> Iterator[Member]:
        """Of those in turn."""
        if self.shares.are_several:
            return self.shares.in_turn()
        return (each for each in self._waiting.values() if each.request_id not in self._planned)

    def _longest(self) -> Iterator[Member]:
        return islice(self._unplanned(), _LEADS)

    # What changes hands.

    def _restore(self, former: FormerLead) -> None:
        """The lead found no memory: the cohort before goes on, with those that joined meanwhile."""
        self._lead_s, self._lead_until_s = former.lead_s, former.lead_until_s
        for name in former.cohort:
            member = self._batch.get(name)
            if member is not None and name not in self.tree:
                self.tree.insert(name, member.hashes, member.priority, member.arrival)
                self.tree.add_to_batch(name)

    def _join(self, joining: Joining, now_s: float) -> None:
        self._changed = True
        member = joining.member
        self.shares.joined(member)
        self._leave_queue(member)
        self.counters.joined(joining, now_s)
        self._batch[member.request_id] = member
        self._priorities[member.priority] += 1

    def _leave_queue(self, member: Member) -> None:
        del self._waiting[member.request_id]
        if self._for_prefix is member:
            self._for_prefix = None
        self.turns.left(member)
        self.shares.left(member)

    def _leave_batch(self, request_id: str) -> Member:
        member = self._batch.pop(request_id)
        self._loading.pop(request_id, None)
        self._priorities[member.priority] -= 1
        if not self._priorities[member.priority]:
            del self._priorities[member.priority]
        return member

    def _return_to_tree(self, member: Member) -> None:
        """To those that wait there. A request of an earlier cohort, or of none, is not in the tree."""
        if self.tree.is_active(member.request_id):
            self.tree.preempt(member.request_id)
        else:
            self.tree.insert(member.request_id, member.hashes, member.priority, member.arrival)
