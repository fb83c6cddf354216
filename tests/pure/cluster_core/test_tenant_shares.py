"""Whose work is next: by weight while all wait, without credit for who was away, and nobody starves."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core import tenant_shares
from cluster_core.tenant_shares import LEAST_TOKENS, Claimant, FairOrder, TenantShares
from tests.planting import planted

TENANTS = ("a", "b", "c", "d")
weights = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=4)
costs = st.lists(st.integers(1, 5000), min_size=1, max_size=6)


class Backlog:
    """Tenants who always have another request; those of each cost what its list says, again and again."""

    def __init__(self, weight_of: dict[str, float], costs_of: dict[str, Sequence[int]]) -> None:
        self.order = FairOrder()
        self.weight_of = weight_of
        self.costs_of = costs_of
        self.begun = dict.fromkeys(weight_of, 0)
        # What each has had by now, for its weight.
        self.had = dict.fromkeys(weight_of, 0.0)
        self.waiting: list[str] = []

    def come(self, *tenants: str) -> None:
        for tenant in tenants:
            self.order.comes(tenant)
            self.waiting.append(tenant)

    def next(self) -> str:
        tenant = min(self.waiting, key=self.order.start)
        own = self.costs_of[tenant]
        cost = own[self.begun[tenant] % len(own)]
        self.order.begins(tenant, max(cost, LEAST_TOKENS), self.weight_of[tenant])
        self.begun[tenant] += 1
        self.had[tenant] += max(cost, LEAST_TOKENS) / self.weight_of[tenant]
        self.order.check_invariants()
        return tenant

    def most(self, tenant: str) -> float:
        """Of one request, for the tenant's weight."""
        return max(LEAST_TOKENS, *self.costs_of[tenant]) / self.weight_of[tenant]


def backlog(given_weights: Sequence[float], given_costs: Sequence[Sequence[int]]) -> Backlog:
    tenants = TENANTS[: len(given_weights)]
    costs_of = {tenant: given_costs[at % len(given_costs)] for at, tenant in enumerate(tenants)}
    return Backlog(dict(zip(tenants, given_weights, strict=True)), costs_of)


def unfairness(tried: Backlog, requests: int) -> float:
    """By how much two tenants that both wait differ at most, over any stretch, beyond one request of each."""
    tried.come(*tried.weight_of)
    ahead = {(one, other): [0.0] for one in tried.had for other in tried.had if one < other}
    for _ in range(requests):
        tried.next()
        for (one, other), differences in ahead.items():
            differences.append(tried.had[one] - tried.had[other])
    return max(
        max(differences) - min(differences) - tried.most(one) - tried.most(other)
        for (one, other), differences in ahead.items()
    )


@given(weights, st.lists(costs, min_size=1, max_size=4))
def test_who_waits_gets_tokens_by_weight_but_for_a_request_of_each(
    given_weights: list[float], given_costs: list[list[int]]
) -> None:
    assert unfairness(backlog(given_weights, given_costs), 200) <= 1e-6


@given(weights, st.lists(costs, min_size=1, max_size=4))
def test_nobody_starves(given_weights: list[float], given_costs: list[list[int]]) -> None:
    """While a tenant waits others begin no more than what moves each of them past it."""
    tried = backlog(given_weights, given_costs)
    tried.come(*tried.weight_of)
    begun = [tried.next() for _ in range(400)]
    for tenant in tried.weight_of:
        furthest = tried.most(tenant)
        between = sum(
            2 + furthest * tried.weight_of[other] / LEAST_TOKENS for other in tried.weight_of if other != tenant
        )
        at = [-1, *(place for place, each in enumerate(begun) if each == tenant)]
        assert all(after - before - 1 <= between for before, after in pairwise(at))
        assert len(begun) - 1 - at[-1] <= between


def after_a_pause(tried: Backlog) -> list[str]:
    """b is away while a is served; who begins when it is back."""
    tried.come("a", "b")
    for _ in range(2):
        tried.next()
    tried.waiting.remove("b")
    tried.order.leaves("b")
    for _ in range(100):
        tried.next()
    tried.come("b")
    return [tried.next() for _ in range(20)]


def test_who_was_away_has_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_a_pause(backlog([1.0, 1.0], [[100]])).count("b") in (10, 11)

    def comes_with_credit(self: FairOrder, tenant: str) -> None:
        self._starts[tenant] = self._starts.get(tenant, 0.0)

    # A planted bug: it starts where it had left off.
    planted(monkeypatch, FairOrder, "comes", comes_with_credit)
    planted(monkeypatch, FairOrder, "leaves", lambda self, tenant: None)
    assert after_a_pause(backlog([1.0, 1.0], [[100]])).count("b") == 20


def test_an_order_without_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = FairOrder.begins
    planted(monkeypatch, FairOrder, "begins", lambda self, tenant, tokens, weight: begins(self, tenant, tokens, 1.0))
    assert unfairness(backlog([1.0, 7.0], [[100]]), 200) > 1000


def beside_who_was_alone(tried: Backlog) -> list[str]:
    """b comes with one request at a time after a had the place for itself; who begins."""
    tried.come("a")
    for _ in range(50):
        tried.next()
    begun = []
    for _ in range(10):
        tried.come("b")
        begun.append(tried.next())
        if "b" in begun[-1:]:
            tried.waiting.remove("b")
            tried.order.leaves("b")
        for _ in range(5):
            begun.append(tried.next())
    return begun


def test_what_a_tenant_had_while_it_was_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes now and then is next each time."""
    assert beside_who_was_alone(backlog([1.0, 1.0], [[100], [300]]))[::6] == ["b"] * 10

    begins = FairOrder.begins

    def begins_beside_others_alone(self: FairOrder, tenant: str, tokens: float, weight: float) -> None:
        if len(self._starts) > 1:
            begins(self, tenant, tokens, weight)

    # A planted bug: who is alone has everything for nothing, and takes it all again from whoever comes.
    planted(monkeypatch, FairOrder, "begins", begins_beside_others_alone)
    assert beside_who_was_alone(backlog([1.0, 1.0], [[100], [300]]))[::6] != ["b"] * 10


def test_coming_and_going_does_not_help() -> None:
    """b leaves after each request, and is back at once."""
    tried = backlog([1.0, 1.0], [[100], [1000]])
    tried.come("a", "b")
    for _ in range(110):
        if tried.next() == "b":
            tried.waiting.remove("b")
            tried.order.leaves("b")
            tried.come("b")
    assert tried.begun == {"a": 100, "b": 10}


def test_tokens_that_were_guessed_are_put_right() -> None:
    order = FairOrder()
    for tenant in "ab":
        order.comes(tenant)
    order.begins("a", 32_000, 1.0)
    assert order.start("b") < order.start("a")
    order.put_right("a", 500 - 32_000, 1.0)
    order.begins("b", 1000, 1.0)
    assert order.start("a") == 500 and order.start("b") == 1000
    order.put_right("b", 64 - 1000, 1.0)
    assert order.start("b") == 64


def test_a_correction_is_no_credit_for_who_was_away() -> None:
    order = FairOrder()
    order.comes("a")
    order.begins("a", 10_000, 1.0)
    order.comes("b")
    for _ in range(50):
        order.begins("b", 100, 1.0)
    order.put_right("a", 1 - 10_000, 1.0)
    order.comes("a")
    assert order.start("a") == order.virtual


def test_tenants_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Thousands would take a second.
    monkeypatch.setattr(tenant_shares, "_MOST_AWAY", 5)
    order = FairOrder()
    for number in range(100):
        order.comes(f"t{number}")
        order.begins(f"t{number}", 100, 1.0)
        order.leaves(f"t{number}")
        order.check_invariants()
    assert order.start("t0") == order.virtual < order.start("t99")


def test_who_is_away_and_not_ahead_any_more_is_forgotten() -> None:
    order = FairOrder()
    for number in range(100):
        order.comes(f"t{number}")
        order.begins(f"t{number}", 1000, 1.0)
        order.leaves(f"t{number}")
    order.comes("on")
    for _ in range(20):
        order.begins("on", 1000, 1.0)
    order.check_invariants()
    # What is remembered is visible nowhere else.
    assert list(order._starts) == ["on"]


moves = st.lists(
    st.tuples(st.sampled_from(["comes", "begins", "leaves"]), st.integers(-1, 1), st.sampled_from(TENANTS)),
    max_size=60,
)


@given(moves)
def test_each_priority_has_an_order_while_somebody_is_there(given_moves: list[tuple[str, int, str]]) -> None:
    shares = TenantShares()
    for what, priority, tenant in given_moves:
        whose = Claimant(priority, tenant)
        if what == "comes":
            shares.comes(whose)
        elif whose in shares.here and what == "begins":
            before = {each: shares.start(each) for each in shares.here}
            shares.begins(whose, 100, 2.0)
            assert {each for each in shares.here if shares.start(each) != before[each]} == {whose}
        elif whose in shares.here:
            shares.leaves(whose)
        shares.check_invariants()
        assert shares.count(priority) == sum(each.priority == priority for each in shares.here)
    for whose in list(shares.here):
        shares.leaves(whose)
    shares.check_invariants()
    assert all(shares.start(Claimant(priority, "a")) == 0.0 for priority in (-1, 0, 1))
