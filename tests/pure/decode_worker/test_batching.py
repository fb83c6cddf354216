"""Who joins the decode batch next: against a slow plain model, by scenario, and in random traffic."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster_core.engine_reports import PolicyRow
from decode_worker import chunk_hashes, turns
from decode_worker.batch_members import Cause, Joining, Member, Plan, Reason
from decode_worker.batching import Batching
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.stop_policies import POLICIES, Action, BatchState, Decision, PolicySettings, StopPolicy
from decode_worker.turns import Turns
from tests.counting import lines_run
from tests.examples import examples, seeds
from tests.state_machines import expect_noticed

BOUND_S = 4.0
PROMPTS = st.lists(st.integers(1, 3), max_size=6).map(tuple)


def hashes_of(prompt: Sequence[Any]) -> list[ChunkHash]:
    """One chunk for each symbol."""
    hashes, value = [], 0
    for symbol in prompt:
        value = hash((value, symbol))
        hashes.append(value)
    return list(hashes)


def common(prompts: Sequence[Sequence[Any]]) -> int:
    """How many symbols all of them begin with."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


@dataclass
class Threshold:
    """Takes what costs at most so many chunks."""

    most_loss_chunks: int = 0
    name: str = "threshold"
    asked: list[BatchState] = field(default_factory=list)

    def decide(self, state: BatchState) -> Action:
        self.asked.append(state)
        return Action.ADD if state.loss_chunks <= self.most_loss_chunks else Action.STOP

    def learn(self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None) -> None:
        return

    def table(self) -> Sequence[PolicyRow]:
        return ()

    def dump(self) -> Any:
        return None

    def load(self, dumped: Any) -> None:
        return


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
    monkeypatch.setattr(owner, name, wrong)
    expect_noticed(BatchingMachine, first_seed=first_seed)


# Scenarios.


class Batch:
    """Steps of half a second, in which each request is admitted that was planned."""

    STEP_S = 0.5

    def __init__(self, policy: StopPolicy | None = None, places: int = 4, **more: Any) -> None:
        self.policy = policy if policy is not None else Threshold()
        self.batching = Batching(self.policy, BOUND_S, **more)
        self.places = places
        self.now_s = 0.0
        self.running: list[str] = []
        self.pulled: set[str] = set()

    def arrive(self, *prompts: str, **more: Any) -> None:
        """A letter is a chunk; the prompt, or what stands before its dot, gives the request its name."""
        for prompt in prompts:
            self.batching.insert(prompt, hashes_of(prompt.partition(".")[0]), self.now_s, **more)

    def step(self, *, by_arrival: bool = False) -> list[tuple[str, Reason]]:
        plan = self.batching.plan(self.now_s, self.places - len(self.running), by_arrival=by_arrival)
        names = plan.request_ids
        self.batching.settle(plan, names, self.pulled & set(names), self.now_s)
        self.running += names
        self.now_s += self.STEP_S
        return [(each.member.request_id, each.reason) for each in plan.joining]

    def names(self, **more: Any) -> list[str]:
        return [name for name, _ in self.step(**more)]

    def end(self, *names: str) -> None:
        for name in names:
            self.running.remove(name)
            assert self.batching.gone(name)

    def tip(self) -> int:
        return self.batching.tree.tip_chunks


def two_groups_take_turns() -> None:
    """A group that always has more waiting holds the other one only for its share of the bound, half of it."""
    batch = Batch(places=2)
    batch.arrive("aaa.1", "aaa.2", "bbb.1", "bbb.2", *[f"aaa.{number}" for number in range(3, 40)])
    assert batch.step() == [("aaa.1", Reason.IDLE), ("aaa.2", Reason.POLICY)]
    admitted = []
    for _ in range(20):
        batch.end(batch.running[0])
        admitted += batch.step()
        if admitted[-1][0].startswith("b"):
            break
    assert admitted[-1] == ("bbb.1", Reason.TURN)
    assert batch.now_s <= BOUND_S / 2 + 3 * Batch.STEP_S
    assert batch.tip() == 3, "the cohort before counts no more"
    batch.end(batch.running[0])
    assert batch.step() == [("bbb.2", Reason.POLICY)]
    assert batch.batching.counters.longest_held_s <= BOUND_S


def a_mixed_batch_finds_back() -> None:
    """Strangers run because nothing else was there; then a long prefix waits, and the batch turns to it at once."""
    batch = Batch(Threshold(99), places=3)
    batch.arrive("xy.1", "zw.1", "uv.1")
    assert len(batch.names()) == 3
    assert batch.tip() == 0
    batch.policy = batch.batching.policy = Threshold()
    batch.arrive("q", "aaaa.1", "aaaa.2", "aaaa.3")
    batch.end("xy.1")
    assert batch.step() == [("aaaa.1", Reason.TURN)]
    batch.end("zw.1", "uv.1")
    assert batch.names() == ["aaaa.2", "aaaa.3"]
    assert batch.tip() == 4


SCENARIOS: dict[Callable[[], None], str] = {
    two_groups_take_turns: "_held_too_long",
    a_mixed_batch_finds_back: "_brings_more",
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_the_lead_changes(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_lead_that_never_changes_is_noticed(scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batching, SCENARIOS[scenario], lambda self, *arguments: None)
    with pytest.raises(AssertionError):
        scenario()


def test_the_best_by_shared_prefix_joins_before_earlier_ones() -> None:
    batch = Batch(POLICIES["greedy"](PolicySettings(), random.Random(0)))
    batch.arrive("abcd.1", "x", "ab.2", "abcd.3", "abcd.2")
    assert batch.names() == ["abcd.1", "ab.2", "abcd.3", "abcd.2"]
    assert batch.tip() == 2


def test_a_stop_ends_the_plan_and_is_among_its_decisions() -> None:
    batch = Batch()
    batch.arrive("aa.1", "aa.2", "b")
    plan = batch.batching.plan(0.0, 4)
    assert plan.request_ids == ["aa.1", "aa.2"]
    states = [BatchState(1, 0, 0), BatchState(2, 2, 0)]
    assert plan.decisions(plan.request_ids) == [Decision(states[0], Action.ADD), Decision(states[1], Action.STOP)]
    # Who was refused formed no batch, and with it the stop did not either.
    assert plan.decisions(["aa.1"]) == []
    batch.batching.settle(plan, ["aa.1"], [], 0.0)
    assert [member.request_id for member in batch.batching.waiting()] == ["aa.2", "b"]


def test_a_refusal_gives_nobody_a_turn() -> None:
    batch = Batch()
    batch.arrive("aa.1", "aa.2", "b", "c")
    plan = batch.batching.plan(0.0, 4)
    batch.batching.settle(plan, [], [], 0.0)
    assert batch.batching.waiting_by_cause() == {Cause.CAPACITY: 4, Cause.HELD: 0, Cause.PREFIX: 0}
    assert batch.names() == ["aa.1", "aa.2"]
    assert batch.batching.waiting_by_cause() == {Cause.CAPACITY: 0, Cause.HELD: 2, Cause.PREFIX: 0}


def test_peers_wait_for_a_prefix_on_its_way_and_join_when_it_is_there() -> None:
    resident: set[ChunkHash] = set()
    batch = Batch(is_resident=lambda chunk: chunk in resident)
    batch.pulled = {"aa.1"}
    batch.arrive("aa.1")
    assert batch.names() == ["aa.1"]
    batch.arrive("aa.2", "aa.3")
    assert batch.names() == []
    assert batch.batching.waiting_by_cause()[Cause.PREFIX] == 1
    assert batch.names() == []
    assert batch.batching.loading_requests == 1
    batch.batching.loaded("aa.1")
    resident.update(hashes_of("aa"))
    assert batch.names() == ["aa.2", "aa.3"]
    # One stands for those behind it: the other was held.
    waited_s = batch.batching.counters.wait_s
    assert (waited_s[Cause.PREFIX], waited_s[Cause.CAPACITY]) == (2 * Batch.STEP_S, 0)
    assert sum(waited_s.values()) == 4 * Batch.STEP_S


def test_a_prefix_that_never_comes_is_waited_for_no_longer_than_the_bound() -> None:
    batch = Batch(is_resident=lambda chunk: False)
    batch.pulled = {"aa.1"}
    batch.arrive("aa.1")
    assert batch.names() == ["aa.1"]
    batch.arrive("aa.2")
    assert batch.names() == []
    while not (joined := batch.step()):
        assert batch.now_s <= BOUND_S + Batch.STEP_S
    assert joined == [("aa.2", Reason.OVERDUE)]


def test_a_pull_that_was_cancelled_holds_nobody() -> None:
    batch = Batch(is_resident=lambda chunk: False)
    batch.pulled = {"aa.1"}
    batch.arrive("aa.1")
    assert batch.names() == ["aa.1"]
    batch.arrive("aa.2")
    assert batch.names() == []
    batch.end("aa.1")
    assert batch.step() == [("aa.2", Reason.IDLE)]


def test_an_overdue_stranger_is_a_guest_and_leaves_the_tip() -> None:
    batch = Batch(places=3)
    batch.arrive("aaaa.1", "aaaa.2", "aaaa.3", "aaaa.4")
    batch.arrive("zz", deadline_s=1.0)
    assert batch.names() == ["aaaa.1", "aaaa.2", "aaaa.3"]
    batch.end("aaaa.1")
    assert batch.step() == [("zz", Reason.OVERDUE)]
    assert batch.tip() == 4
    assert "zz" not in batch.batching.tree
    with pytest.raises(ValueError, match="zz"):
        batch.arrive("zz")
    # A preempted request from outside the cohort waits as all do.
    batch.running.remove("zz")
    batch.batching.preempted("zz", batch.now_s)
    assert batch.step() == [("zz", Reason.OVERDUE)]
    batch.end("zz")
    assert batch.names() == ["aaaa.4"]


def test_a_deadline_is_due_at_half() -> None:
    batch = Batch()
    batch.arrive("aa.1", "aa.2")
    batch.names()
    batch.arrive("b", deadline_s=batch.now_s + 3.0)
    began_s = batch.now_s
    while not (joined := batch.step()):
        pass
    assert joined == [("b", Reason.OVERDUE)]
    assert batch.now_s - Batch.STEP_S - began_s == 1.5


def test_a_batch_that_shrinks_to_one_takes_who_shares_what_others_want() -> None:
    """The rest of a single prompt is nobody's loss: the peers join although its own tail goes from the tip."""
    batch = Batch()
    batch.arrive("aabbbb", "aacccc")
    assert batch.names() == ["aabbbb", "aacccc"]
    batch.end("aacccc")
    assert batch.tip() == 6
    batch.arrive("aadddd")
    assert batch.names() == ["aadddd"]
    assert batch.tip() == 2
    assert batch.batching.counters.lost_chunks == 0


def test_urgent_requests_join_whatever_they_share() -> None:
    batch = Batch()
    batch.arrive("aaaa.1", "aaaa.2")
    batch.names()
    batch.arrive("aaaa.3")
    batch.arrive("z", priority=-1)
    assert batch.step() == [("z", Reason.PRIORITY), ("aaaa.3", Reason.POLICY)]


def test_prompts_shorter_than_a_chunk_are_served_in_order() -> None:
    batch = Batch(places=2)
    batch.arrive(*[f".{number}" for number in range(6)])
    admitted = []
    while batch.batching.waiting_requests:
        admitted += batch.names()
        batch.end(*batch.running)
    assert admitted == [f".{number}" for number in range(6)]


def test_prompts_of_a_hundred_thousand_tokens() -> None:
    tokens = list(range(100_000))
    batching = Batching(Threshold(), BOUND_S)
    for name, changed in (("one", 99_999), ("other", 10), ("peer", 99_990)):
        prompt = [*tokens[:changed], 0, *tokens[changed + 1 :]]
        batching.insert(name, chunk_hashes.of_tokens(prompt, 16), 0.0)
    plan = batching.plan(0.0, 8)
    assert plan.request_ids == ["one", "peer"]
    batching.settle(plan, plan.request_ids, [], 0.0)
    assert batching.tree.tip_chunks == 99_990 // 16


def test_preempted_requests_come_first_by_arrival() -> None:
    batch = Batch(places=3)
    batch.arrive("a", "b", "c", "d")
    assert batch.names(by_arrival=True) == ["a", "b", "c"]
    for name in ("c", "b"):
        batch.running.remove(name)
        batch.batching.preempted(name, batch.now_s)
    assert batch.names(by_arrival=True) == ["b", "c"]
    batch.end("a")
    assert batch.names(by_arrival=True) == ["d"]
    assert batch.batching.counters.admissions == {Reason.FCFS: 6}


def test_due_times_of_those_that_are_gone_are_forgotten() -> None:
    """Thousands of requests with deadlines far away come and go by arrival, where nobody asks who is overdue."""
    batch = Batch()
    for number in range(5000):
        batch.arrive(f"a.{number}", deadline_s=1e6)
        assert batch.names(by_arrival=True)
        batch.end(*batch.running)
    assert batch.batching.turns.due_times < 2 * turns.SLACK
    assert not batch.batching.turns.before_turn


def test_the_order_of_arrival_is_a_few_lines_for_each_that_waits_where_priorities_are_mixed() -> None:
    """Two hundred join, some of each priority wait."""

    def work(waiting: int) -> int:
        rng, batching = random.Random(0), Batching(Threshold(), BOUND_S)
        for number in range(waiting):
            batching.insert(str(number), [], 0.0, priority=rng.randrange(3))

        def join() -> None:
            plan = batching.plan(0.0, 200, by_arrival=True)
            assert {each.member.priority for each in plan.joining} == {0}
            assert len(plan.joining) == 200
            batching.settle(plan, plan.request_ids, [], 0.0)

        return lines_run(join)

    assert work(6000) - work(1000) <= 5 * 5000


# Starvation.


def longest_hold_s(policy: str, seed: int) -> float:
    """Random traffic, everybody admitted who is planned: the longest time that a request was held while places were
    free in every plan, or until one was. Raises AssertionError when somebody never comes."""
    rng = random.Random(seed)
    step_s, places = 0.05, rng.choice((2, 8, 32))
    stop = POLICIES[policy](PolicySettings(), random.Random(seed))
    batching = Batching(stop, BOUND_S, lambda chunk: rng.random() < 0.8)
    prefixes = [tuple(rng.randrange(9) for _ in range(rng.randint(1, 30))) for _ in range(rng.randint(1, 12))]
    # Nearly all share one prefix, so that there always is somebody better.
    weights = [50.0, *[1.0] * (len(prefixes) - 1)]
    ends: dict[str, float] = {}
    pulled: dict[str, float] = {}
    free_since: dict[str, float] = {}
    longest_s, load = 0.0, rng.choice((0.5, 1.0, 1.5))
    for turn in range(1200):
        now_s = turn * step_s
        for name in [name for name, at_s in ends.items() if at_s <= now_s]:
            del ends[name]
            assert batching.gone(name)
        for name in [name for name, at_s in pulled.items() if at_s <= now_s or name not in ends]:
            del pulled[name]
            batching.loaded(name)
        if ends and rng.random() < 0.02:
            name = rng.choice(sorted(ends))
            del ends[name]
            batching.preempted(name, now_s)
        while rng.random() < min(0.9, load * places * step_s):
            prompt = rng.choices(prefixes, weights)[0] + (turn,)
            batching.insert(f"{turn}.{rng.random()}", hashes_of(prompt), now_s)
        free = places - len(ends)
        before = {member.request_id: member for member in batching.waiting()}
        plan = batching.plan(now_s, free)
        batching.settle(plan, plan.request_ids, [name for name in plan.request_ids if rng.random() < 0.3], now_s)
        pulled.update(dict.fromkeys(batching.loading(), now_s + 0.3))
        stop.learn(plan.decisions(plan.request_ids), 100.0 + rng.random(), None)
        for name in plan.request_ids:
            ends[name] = now_s + rng.uniform(0.05, 1.5)
            free_since.pop(name, None)
        # Held for too long is who is due while a place stays free, or is passed over by somebody who is not.
        late = [member for name, member in before.items() if batching.waits(name) and member.due_s <= now_s]
        if late and len(plan.joining) < free:
            longest_s = max(longest_s, max(now_s - member.turn_s for member in late))
        assert not late or all(each.reason is Reason.OVERDUE for each in plan.joining), "the overdue are passed over"
        for each in plan.joining:
            if each.reason is not Reason.OVERDUE:
                longest_s = max(longest_s, now_s - each.member.turn_s)
    return longest_s


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_held_beyond_the_bound_while_places_are_free(policy: str) -> None:
    assert max(longest_hold_s(policy, seed) for seed in seeds(6, few=2)) <= BOUND_S


def test_without_the_bound_somebody_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "overdue", lambda self, now_s, planned: None)
    monkeypatch.setattr(Batching, "_held_too_long", lambda self, priority, now_s: None)
    with pytest.raises(AssertionError):
        assert max(longest_hold_s("heuristic", seed) for seed in seeds(6, few=2)) <= BOUND_S


def admit(batching: Batching, now_s: float, places: int) -> list[str]:
    """Who joins: everybody who was planned."""
    plan = batching.plan(now_s, places)
    batching.settle(plan, plan.request_ids, (), now_s)
    return plan.request_ids


def test_an_overdue_request_takes_the_place_that_a_more_urgent_one_does_not_get() -> None:
    batching = Batching(Threshold(0), BOUND_S)
    for name in ("leads", "peer"):
        batching.insert(name, (1, 2), 0.0)
    assert admit(batching, 0.0, 4) == ["leads", "peer"]
    batching.insert("stranger", (7, 8), 0.1, priority=1)
    batching.insert("urgent", (5, 6), 0.1)
    assert admit(batching, 0.1, 3) == []
    batching.gone("urgent")
    batching.insert("also urgent", (5, 6), 0.1 + BOUND_S)
    assert admit(batching, 0.1 + BOUND_S, 3) == ["stranger"]


def test_while_a_prefix_is_pulled_one_that_need_not_wait_runs() -> None:
    resident = {4}
    batching = Batching(Threshold(99), BOUND_S, lambda chunk: chunk in resident)
    for name in ("pulls", "peer", "peer too"):
        batching.insert(name, (1, 2, name.encode()), 0.0, pulls=True)
    plan = batching.plan(0.0, 8)
    assert plan.request_ids == ["pulls"], "its peers would pull the same"
    batching.settle(plan, ["pulls"], ["pulls"], 0.0)
    assert batching.plan(0.1, 8).request_ids == []
    batching.settle(batching.plan(0.1, 8), (), (), 0.1)
    batching.insert("resident", (4,), 0.2)
    plan = batching.plan(0.2, 8)
    assert [(each.member.request_id, each.joins_cohort) for each in plan.joining] == [("resident", False)]
    batching.settle(plan, ["resident"], (), 0.2)
    assert admit(batching, 0.3, 8) == [], "something runs"
    resident |= {1, 2}
    batching.loaded("pulls")
    assert sorted(admit(batching, 0.4, 8)) == ["peer", "peer too"]


def test_a_prefix_is_pulled_once_also_after_the_lead_has_changed() -> None:
    batching = Batching(Threshold(99), BOUND_S, lambda chunk: False)
    batching.insert("pulls", (1, 2), 0.0, pulls=True)
    batching.settle(batching.plan(0.0, 1), ["pulls"], ["pulls"], 0.0)
    batching.tree.finish_all()
    batching.insert("peer", (1, 2, 3), 0.1, pulls=True)
    assert admit(batching, 0.1, 8) == []
    batching.loaded("pulls")
    assert admit(batching, 0.2, 8) == ["peer"]


def test_a_lead_that_finds_no_memory_changes_nothing() -> None:
    batching = Batching(Threshold(0), BOUND_S)
    for name in ("a1", "a2"):
        batching.insert(name, (1, 2), 0.0)
    plan = batching.plan(0.0, 2)
    batching.settle(plan, plan.request_ids, (), 0.0)
    cohort, tip = batching.tree.active_requests, batching.tree.tip_chunks
    assert cohort
    for name in ("b1", "b2"):
        batching.insert(name, (5, 6), 0.1)
    admit(batching, 0.1, 1)
    plan = batching.plan(0.1 + BOUND_S * 0.8, 1)
    assert plan.joining[0].reason is Reason.TURN
    assert batching.tree.tip_chunks == 2
    batching.settle(plan, (), (), 0.1 + BOUND_S * 0.8)
    assert (batching.tree.active_requests, batching.tree.tip_chunks) == (cohort, tip)
    assert batching.tree.candidate("b1").tip_after == 0
    batching.tree.check_invariants()
