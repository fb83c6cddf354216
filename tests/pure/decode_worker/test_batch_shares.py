"""Of several tenants none gets far ahead in the decode batch: by weight, without credit, whatever is shared or late."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.engine_jobs import TenantShare
from cluster_core.tenant_shares import FairOrder
from decode_worker.batch_members import Member, Reason
from decode_worker.batch_shares import SLACK_TOKENS, BatchShares
from decode_worker.batching import Batching
from tests.planting import planted
from tests.pure.decode_worker.batch_steps import BOUND_S, Batch, Threshold, admit
from tests.pure.decode_worker.tenant_backlog import MANY, Backlog, joins_after


def beyond_slack(tried: Backlog, steps: int, *, by_arrival: bool = False) -> float:
    """By how much two tenants that both wait differ at most, beyond the slack and a request of each."""
    worst = -SLACK_TOKENS * 1000.0
    for _ in range(20):
        for tenant in tried.weight_of:
            tried.come(tenant)
    for _ in range(steps):
        for name in tried.step(by_arrival=by_arrival):
            tried.come(name.partition(".")[0])
        for one, other in ((a, b) for a in tried.had for b in tried.had if a != b):
            ahead = tried.had[one] - tried.had[other]
            slack = SLACK_TOKENS / (tried.weight_of[one] or 1.0)
            worst = max(worst, ahead - slack - tried.most(one) - tried.most(other))
    return worst


weights = st.lists(st.sampled_from([0.25, 1.0, 3.0, 0.0]), min_size=2, max_size=4)


@given(weights, st.lists(st.integers(1, 20_000), min_size=4, max_size=4), st.booleans())
def test_nobody_who_waits_gets_further_behind_than_the_slack(
    given_weights: list[float], tokens: list[int], by_arrival: bool
) -> None:
    tenants = "abcd"[: len(given_weights)]
    tried = Backlog(dict(zip(tenants, given_weights, strict=True)), dict(zip(tenants, tokens, strict=False)))
    assert beyond_slack(tried, 80, by_arrival=by_arrival) <= 1e-6


def test_the_policy_is_free_within_the_slack_and_a_share_ends_it() -> None:
    tried = Backlog({"a": 1.0, "b": 1.0}, {"a": MANY, "b": MANY})
    for _ in range(10):
        tried.come("a")
    tried.come("b")
    joined = [name[0] for _ in range(6) for name in tried.step()]
    assert joined[:4] == ["a", "a", "a", "b"], "which share with each other; then three have had 24,000 tokens"
    assert tried.reasons[Reason.SHARE] == 1


def test_weights_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, TenantShare, "part", 1.0)
    assert beyond_slack(Backlog({"a": 0.25, "b": 3.0}, {"a": MANY, "b": MANY}), 80) > MANY


def test_one_that_asks_little_passes_those_that_wait_by_the_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the other one was alone before, and though its requests share a prefix with the batch."""

    def waits() -> list[int]:
        tried = Backlog({"flood": 1.0, "few": 1.0}, {"flood": MANY, "few": 600})
        for _ in range(120):
            tried.come("flood")
        for _ in range(120):
            for _ in tried.step():
                tried.come("flood")
        return [joins_after(tried, tried.come("few")) for _ in range(5)]

    assert max(waits()) <= 1 + SLACK_TOKENS // MANY
    # A planted bug: overdue requests join whoever is behind, and all of them are overdue.
    planted(monkeypatch, BatchShares, "is_in_turn", lambda self, member: True)
    assert max(waits()) > 100


def test_what_a_tenant_had_while_it_was_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes now and then does not wait until the other one has had as much beside it."""

    def waits() -> list[int]:
        tried = Backlog({"flood": 1.0, "few": 0.1}, {"flood": MANY, "few": 20_000}, places=1)
        for _ in range(2):
            tried.come("flood")
        found = []
        for _ in range(6):
            for _ in range(40):
                for _ in tried.step(by_arrival=True):
                    tried.come("flood")
            name, others = tried.come("few"), 0
            while name not in tried.step(by_arrival=True):
                tried.come("flood")
                others += 1
            found.append(others)
        return found

    assert max(waits()) <= 2 + (20_000 - SLACK_TOKENS) * 10 // MANY
    joined = BatchShares.joined

    def joined_beside_others_alone(self: BatchShares, member: Member) -> None:
        if self.are_several:
            joined(self, member)

    planted(monkeypatch, BatchShares, "joined", joined_beside_others_alone)
    assert max(waits()) > 10


def test_who_was_away_has_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside_after_a_pause() -> int:
        tried = Backlog({"flood": 1.0, "pauses": 1.0}, {"flood": MANY, "pauses": MANY})
        for _ in range(100):
            tried.come("flood")
        for _ in range(100):
            for _ in tried.step():
                tried.come("flood")
        for _ in range(50):
            tried.come("pauses")
        joined: Counter[str] = Counter()
        while joined.total() < 40:
            for name in tried.step():
                tried.come(name.partition(".")[0])
                joined[name.partition(".")[0]] += 1
        return joined["pauses"]

    assert 14 <= beside_after_a_pause() <= 26
    planted(monkeypatch, FairOrder, "comes", lambda self, tenant: self._starts.setdefault(tenant, 0.0))
    assert beside_after_a_pause() >= 38


def test_who_is_preempted_does_not_come_first_of_its_tenant_for_ever() -> None:
    shares = BatchShares()
    share = TenantShare("a")
    older, newer = (Member(name, (), 0, number, 0.0, tokens=9, tenant=share) for number, name in enumerate("on"))
    for member in (older, newer):
        shares.waits(member)
    for _ in range(3):
        shares.joined(newer)
        shares.left(newer)
        shares.waits(newer)
        assert shares.furthest_behind(0) is older
    shares.joined(older)
    shares.left(older)
    shares.waits(older)
    assert shares.furthest_behind(0) is older, "nor does it come last"


def test_refused_requests_cost_nothing() -> None:
    tried = Backlog({"a": 1.0, "b": 1.0}, {"a": 30_000, "b": 30_000})
    for _ in range(3):
        tried.come("a")
        tried.come("b")
    for _ in range(5):
        plan = tried.batching.plan(0.0, 2)
        assert [name[0] for name in plan.request_ids] == ["a", "b"]
        tried.batching.settle(plan, [], [], 0.0)
        tried.batching.shares.check_invariants()


def test_each_priority_has_its_own_shares() -> None:
    tried = Backlog({"a": 1.0, "b": 1.0}, {"a": 30_000, "b": 30_000}, places=1)
    for _ in range(4):
        tried.come("a")
    for _ in range(3):
        tried.step()
    tried.come("a", priority=1)
    tried.come("b", priority=1)
    assert tried.step() == ["a.4"], "the lower number goes first, however far ahead its tenant is"
    assert tried.step() == ["a.5"], "nobody is ahead there"
    assert tried.step() == ["b.6"]


def test_one_tenant_is_as_none() -> None:
    def play(**more: Any) -> list[list[tuple[str, Reason]]]:
        batch = Batch(places=2)
        batch.arrive("aa.1", "b", "aa.2", "c", tokens=100_000, **more)
        steps = []
        for _ in range(12):
            steps.append(batch.step())
            batch.end(*batch.running[:1])
        return steps

    assert play() == play(tenant=TenantShare("one", 0.01))


def test_who_is_cancelled_while_planned_is_forgotten() -> None:
    batching = Batching(Threshold(99), BOUND_S)
    for number, tenant in enumerate("abab"):
        batching.insert(str(number), [], 0.0, tokens=100, tenant=TenantShare(tenant))
    plan = batching.plan(0.0, 3)
    batching.gone("1")
    batching.settle(plan, ["0", "2"], [], 0.0)
    batching.shares.check_invariants()
    assert admit(batching, 0.0, 4) == ["3"]
