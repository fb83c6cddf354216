"""Batching against a slow plain model, which has to notice each of the planted bugs."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker import turns
from decode_worker.batch_members import Cause, Joining, Member, Plan, Reason
from decode_worker.batching import Batching
from decode_worker.stop_policies import Action
from decode_worker.turns import Turns
from tests.examples import examples
from tests.planting import planted
from tests.pure.decode_worker.batch_steps import BOUND_S, Threshold, hashes_of
from tests.state_machines import expect_noticed

PROMPTS = st.lists(st.integers(1, 3), max_size=6).map(tuple)


def common(prompts: Sequence[Sequence[Any]]) -> int:
    """How many symbols all of them begin with."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


@dataclass
class Known:
    """What the model knows of a request. arrived_s: since when it waits, this time."""

    prompt: tuple[int, ...]
    priority: int
    arrival: int
    arrived_s: float
    turn_s: float = inf
    due_s: float = inf


class BatchingMachine(RuleBasedStateMachine):
    """Lists, where Batching has heaps and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Threshold()
        self.resident = True
        self.batching = Batching(self.policy, BOUND_S, lambda chunk: self.resident)
        self.now_s = 0.0
        self.known: dict[str, Known] = {}
        # In order: those that wait; who was preempted last in front.
        self.queue: list[str] = []
        self.batch: set[str] = set()
        self.cohort: set[str] = set()
        self.loading: set[str] = set()
        self.by_arrival = False
        self.arrivals = self.departures = self.admitted = self.lost_chunks = 0
        self.waited_s = 0.0

    # What happens.

    @rule(prompt=PROMPTS, priority=st.sampled_from((0, 0, 0, 1, -1)), deadline_in=st.sampled_from((None, None, -1, 3)))
    def insert(self, prompt: tuple[int, ...], priority: int, deadline_in: float | None) -> None:
        name = f"r{self.arrivals}"
        deadline_s = None if deadline_in is None else self.now_s + deadline_in
        self.batching.insert(name, hashes_of(prompt), self.now_s, priority, deadline_s)
        due_s = inf if deadline_in is None else self.now_s + max(0, deadline_in) / 2
        self.known[name] = Known(prompt, priority, self.arrivals, self.now_s, due_s=due_s)
        self.queue.append(name)
        self.arrivals += 1

    @rule(seconds=st.sampled_from((0.25, 1.0, 5.0)))
    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(most_loss=st.sampled_from((-1, 0, 1, 99)), resident=st.booleans())
    def change_the_policy(self, most_loss: int, resident: bool) -> None:
        self.policy.most_loss_chunks, self.resident = most_loss, resident

    @rule(places=st.integers(0, 4), by_arrival=st.sampled_from((False, False, False, True)), data=st.data())
    def step(self, places: int, by_arrival: bool, data: st.DataObject) -> None:
        plan = self.batching.plan(self.now_s, places, by_arrival=by_arrival)
        if by_arrival is not self.by_arrival:
            self.by_arrival = by_arrival
            self.cohort.clear()
        self.check_plan(plan, places)
        names = plan.request_ids
        cancelled = data.draw(st.sampled_from([None, None, None, *names]), label="cancelled")
        if cancelled is not None:
            assert self.batching.gone(cancelled)
            self.forget(cancelled)
        all_of_it = data.draw(st.sampled_from((True, True, False)), label="everybody is admitted")
        admitted = {name for name in names if name in self.known and (all_of_it or data.draw(st.booleans()))}
        pulling = {name for name in admitted if data.draw(st.sampled_from((False, False, True)))}
        self.batching.settle(plan, admitted, pulling, self.now_s)
        for each in plan.joining:
            self.settle(each, each.member.request_id in admitted)
        self.loading |= pulling
        if self.former is not None and self.former[0] not in admitted:
            self.cohort |= self.former[1] & self.batch
        self.give_turns(places - len(names) if len(admitted) == len(names) else 0)

    @precondition(lambda self: self.batch)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.batch)))
        self.batching.preempted(name, self.now_s)
        for names in (self.batch, self.cohort, self.loading):
            names.discard(name)
        self.queue.insert(0, name)
        self.departures -= 1
        its = self.known[name]
        its.arrived_s = its.turn_s = its.due_s = self.now_s

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        assert self.batching.gone(name)
        self.forget(name)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        self.batching.loaded(name)
        self.loading.remove(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def insert_twice(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        with pytest.raises(ValueError, match=f"request {name} is known already"):
            self.batching.insert(name, [], self.now_s)

    @rule()
    def name_somebody_unknown(self) -> None:
        assert not self.batching.gone("nobody")
        for name in ("nobody", *self.queue[:1]):
            with pytest.raises(KeyError):
                self.batching.preempted(name, self.now_s)

    # The model.

    def forget(self, name: str) -> None:
        del self.known[name]
        for names in (self.batch, self.cohort, self.loading):
            names.discard(name)
        if name in self.queue:
            self.queue.remove(name)
            self.departures += 1

    def settle(self, joining: Joining, admitted: bool) -> None:
        name = joining.member.request_id
        if not admitted:
            self.cohort.discard(name)
            return
        self.queue.remove(name)
        self.batch.add(name)
        self.departures += 1
        self.admitted += 1
        self.lost_chunks += joining.loss_chunks
        self.waited_s += self.now_s - self.known[name].arrived_s

    def give_turns(self, free_places: int) -> None:
        """As many have left as arrived before, and itself one of them; or a place is free for it."""
        for name in self.queue:
            its = self.known[name]
            if its.turn_s == inf and self.departures + free_places > its.arrival:
                its.turn_s = self.now_s
                its.due_s = min(its.due_s, self.now_s + turns.DUE_SHARE * BOUND_S)

    def check_plan(self, plan: Plan, places: int) -> None:
        rest = list(self.queue)
        self.former: tuple[str, set[str]] | None = None
        assert len(plan.joining) <= places
        if not self.batch and rest and places:
            assert plan.joining, "the batch is empty, somebody waits, and nobody joins"
        if self.by_arrival:
            assert plan.request_ids == sorted(rest, key=lambda name: self.known[name].priority)[:places]
        for each in plan.joining:
            name, its = each.member.request_id, self.known[each.member.request_id]
            rest.remove(name)
            others = [self.known[other] for other in rest]
            passed = [other for other in others if other.priority < its.priority]
            may_pass = each.reason is Reason.OVERDUE and all(other.due_s > self.now_s for other in passed)
            assert not passed or may_pass, f"{name} passes over who is more urgent"
            overdue = [other for other in others if other.due_s <= self.now_s and other.priority == its.priority]
            if not self.by_arrival:
                assert not overdue or its.due_s <= min(other.due_s for other in overdue), f"{name} passes the overdue"
            takes_lead = each.reason in (Reason.TURN, Reason.IDLE) and each.joins_cohort
            if takes_lead or (each.reason is Reason.OVERDUE and not self.cohort):
                self.former = self.former or (name, set(self.cohort))
                self.cohort.clear()
            if each.joins_cohort:
                self.cohort.add(name)
        assert (plan.stop is None) or plan.stop.action is Action.STOP
        if len(plan.joining) < places:
            late = [name for name in rest if self.known[name].due_s <= self.now_s]
            assert not late, f"{late} could have joined"

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        batching, tree = self.batching, self.batching.tree
        assert [member.request_id for member in batching.waiting()] == self.queue
        assert batching.waiting_requests == len(self.queue) == tree.waiting_requests
        for name in self.known:
            assert name in batching
            assert batching.waits(name) == (name in self.queue) == (name not in self.batch)
            assert tree.is_active(name) == (name in self.cohort) if name in tree else name in self.batch - self.cohort
        assert "nobody" not in batching
        assert sorted(batching.loading()) == sorted(self.loading)
        assert self.cohort <= self.batch
        assert tree.active_requests == len(self.cohort)
        tree.check_invariants()

    @invariant()
    def the_tip_is_what_the_cohort_shares(self) -> None:
        assert self.batching.tree.tip_chunks == common([self.known[name].prompt for name in self.cohort])

    @invariant()
    def turns_and_due_times_are_those_of_the_model(self) -> None:
        for member in self.batching.waiting():
            its = self.known[member.request_id]
            assert (member.turn_s, member.due_s) == (its.turn_s, its.due_s), member
        assert self.batching.turns.due_times <= 2 * len(self.queue) + turns.SLACK

    @invariant()
    def counters_add_up(self) -> None:
        counters = self.batching.counters
        assert counters.admissions.total() == self.admitted
        assert counters.lost_chunks == self.lost_chunks
        assert sum(counters.wait_s.values()) == self.waited_s
        assert counters.decisions == len(self.policy.asked)
        causes = Counter(member.cause for member in self.batching.waiting())
        assert self.batching.waiting_by_cause() == {cause: causes[cause] for cause in Cause}


TestBatching = BatchingMachine.TestCase
TestBatching.settings = examples(200, steps=40)


# Bugs that the machine has to notice.


def _ignores_priorities(self: Any, most: int) -> Iterator[Member]:
    return iter(list(self._waiting.values()))


def _longest_overdue(self: Any, now_s: float, planned: Collection[str]) -> Member | None:
    late = [each for each in self._waiting.values() if each.due_s <= now_s and each.request_id not in planned]
    return min(late, key=lambda each: each.due_s, default=None)


def _never_put_back(self: Any, member: Member) -> None:
    if self.tree.is_active(member.request_id):
        self.tree.finish(member.request_id)


def _leads_whoever_is_first(self: Any, priority: int) -> Member:
    first: Member = next(self._unplanned())
    return first


def _forgets_to_leave_the_batch(self: Any, request_id: str) -> bool:
    return bool(self.tree.discard(request_id)) or request_id in self


# What is planted where, and a seed that notices it soon.
BUGS: dict[str, tuple[type, str, Any, int]] = {
    "overdue_requests_are_held_on": (Turns, "overdue", lambda self, now_s, planned: None, 38),
    "an_overdue_request_hides_more_urgent_ones": (Turns, "overdue", _longest_overdue, 0),
    "turns_are_never_given": (Turns, "give", lambda self, free_places, now_s: None, 18),
    "refused_requests_are_not_put_back": (Batching, "_return_to_tree", _never_put_back, 11),
    "the_lead_ignores_priorities": (Batching, "_new_lead", _leads_whoever_is_first, 11),
    "arrival_order_ignores_priorities": (Batching, "_first_by_arrival", _ignores_priorities, 38),
    "who_is_gone_stays": (Batching, "gone", _forgets_to_leave_the_batch, 37),
    "a_deadline_is_no_due_time": (Turns, "_set_due", lambda self, member, due_s: None, 4),
    "the_departed_do_not_count": (
        Batching,
        "_leave_queue",
        lambda self, member: self._waiting.pop(member.request_id),
        38,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_notices(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, first_seed = BUGS[bug]
    planted(monkeypatch, owner, name, wrong)
    expect_noticed(BatchingMachine, first_seed=first_seed)
