"""Rates of tenants over several routers: nobody gets more over time, who asks gets them, and Redis may be away."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.errors import OverloadedError
from control_plane.access.tenant_limits import UNLIMITED, TenantLimits
from control_plane.intake import tenant_rates
from control_plane.intake.tenant_rates import MOST_DEBT_S, Limit, Spent, TenantRates
from tests.planting import planted

RATE, BURST_S = 10.0, 2.0
STEP_S = 0.1


@dataclass(slots=True)
class Buckets:
    """What Redis keeps, in the plainest way."""

    kept: dict[tuple[str, Limit], tuple[float, float]] = field(default_factory=dict)

    def spend(self, spent: Iterable[Spent], now_s: float) -> list[float]:
        levels = []
        for each in spent:
            level, at_s = self.kept.get((each.tenant, each.limit), (each.burst, now_s))
            level = min(each.burst, level + (now_s - at_s) * each.rate_per_s) - each.amount
            level = min(each.burst, max(level, -MOST_DEBT_S * each.rate_per_s))
            self.kept[each.tenant, each.limit] = level, now_s
            levels.append(level)
        return levels


@dataclass(slots=True)
class Routers:
    """Several, over one Redis that answers at once, or not at all."""

    many: int
    limits: TenantLimits
    buckets: Buckets = field(default_factory=Buckets)
    is_away: bool = False
    now_s: float = 0.0
    rates: list[TenantRates] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rates = [TenantRates(lambda tenant: self.limits, self.many) for _ in range(self.many)]

    def asks(self, router: int, tokens: int = 0) -> bool:
        """Whether a request of that many tokens is taken."""
        try:
            self.rates[router].begin("acme", self.now_s)
        except OverloadedError:
            return False
        self.rates[router].spend("acme", tokens, self.now_s)
        return True

    def share(self, router: int) -> None:
        rates = self.rates[router]
        spent = rates.to_tell(rates.tenants(), self.now_s)
        if self.is_away:
            rates.not_told(spent)
        else:
            rates.told(spent, self.buckets.spend(spent, self.now_s), self.now_s)
        rates.check_invariants()

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for router in range(self.many):
            self.share(router)


def taken_of_all(routers: Routers, seconds: float, asked: Callable[[int], Iterable[int]]) -> int:
    """How many are taken while more is asked for than there is. asked: at which routers, in which step."""
    taken = 0
    for step in range(round(seconds / STEP_S)):
        taken += sum(routers.asks(router) for router in asked(step))
        routers.pass_s(STEP_S)
    return taken


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("spread", ["one", "all"])
def test_a_tenant_that_asks_for_more_gets_its_rate_over_all_routers(many: int, spread: str) -> None:
    routers = Routers(many, TenantLimits(requests_per_s=RATE, burst_s=BURST_S))
    at = range(many) if spread == "all" else [0]
    taken = taken_of_all(routers, 30.0, lambda step: [router for router in at for _ in range(20)])
    assert 30 * RATE <= taken <= 30 * RATE + BURST_S * RATE + 2 * many


def test_spending_that_nobody_is_told_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> int:
        routers = Routers(1, TenantLimits(requests_per_s=RATE, burst_s=BURST_S))
        return taken_of_all(routers, 60.0, lambda step: [0, 0])

    assert taken() <= 60 * RATE + BURST_S * RATE + 2
    # A planted bug is private: the level in Redis never falls.
    spend = TenantRates._spend

    def spend_in_secret(self: TenantRates, tenant: str, limit: Limit, amount: float, now_s: float) -> None:
        spend(self, tenant, limit, amount, now_s)
        # As above.
        self._parts[tenant][limit].untold = 0.0

    planted(monkeypatch, TenantRates, "_spend", spend_in_secret)
    assert taken() > 1.9 * 60 * RATE


@given(
    many=st.integers(1, 4),
    steps=st.lists(
        st.tuples(st.floats(0, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12)),
        max_size=60,
    ),
)
def test_nobody_gets_more_than_the_rate_over_time_but_for_what_routers_cannot_know(
    many: int, steps: list[tuple[float, list[tuple[int, int]]]]
) -> None:
    """Tokens: below a burst, the rate, and what each router takes before it hears of the others."""
    routers = Routers(many, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    spent, burst = 0, RATE * BURST_S
    for seconds, asked in steps:
        before = spent
        for router, tokens in asked:
            if router < many and routers.asks(router, tokens):
                spent += tokens
        # A router that knows nothing yet takes its part of a burst, and each one the request that goes beyond it.
        assert spent - before <= burst + many * 60
        assert spent <= RATE * routers.now_s + 2 * burst + many * 60 + 1e-6
        routers.pass_s(seconds)


def test_a_request_that_costs_more_than_a_burst_is_taken_once_and_waited_for() -> None:
    routers = Routers(1, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    assert routers.asks(0, tokens=120)
    routers.pass_s(STEP_S)
    with pytest.raises(
        OverloadedError, match=r"the tenant `acme` has had its tokens: tokens_per_s is 10 over"
    ) as raised:
        routers.rates[0].begin("acme", routers.now_s)
    assert raised.value.status == "RESOURCE_EXHAUSTED"
    # 100 are owed, less what came back in a step.
    assert raised.value.retry_after_ms == pytest.approx(10_000, abs=150)
    assert routers.rates[0].refused == {"tokens_per_s": 1}
    routers.pass_s((raised.value.retry_after_ms or 0) / 1000 + 0.001)
    assert routers.asks(0)


def test_a_refused_request_costs_nothing() -> None:
    routers = Routers(1, TenantLimits(requests_per_s=RATE, tokens_per_s=RATE, burst_s=BURST_S))
    assert routers.asks(0, tokens=30)
    for _ in range(1000):
        assert not routers.asks(0, tokens=1000)
    routers.pass_s(0.0)
    routers.pass_s(1.1)
    assert routers.asks(0)


def test_no_debt_is_longer_than_an_hour() -> None:
    routers = Routers(2, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    routers.asks(0, tokens=10**12)
    for _ in range(3):
        with pytest.raises(OverloadedError) as raised:
            routers.rates[0].begin("acme", routers.now_s)
        assert raised.value.retry_after_ms == pytest.approx(MOST_DEBT_S * 1000, rel=0.001)
        routers.pass_s(0.0)


def test_an_answer_that_goes_on_is_refused_only_below_a_burst_of_debt() -> None:
    rates = TenantRates(lambda tenant: TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    rates.spend("acme", 30, 0.0)
    with pytest.raises(OverloadedError):
        rates.begin("acme", 0.0)
    rates.begin("acme", 0.0, resumed=True)
    rates.spend("acme", 10, 0.0)
    with pytest.raises(OverloadedError):
        rates.begin("acme", 0.0, resumed=True)


def test_without_redis_each_router_goes_on_with_its_part_and_nothing_is_owed_for_it() -> None:
    routers = Routers(2, TenantLimits(requests_per_s=RATE, burst_s=BURST_S))
    both = lambda step: [0, 1] * 10  # noqa: E731
    taken_of_all(routers, 20.0, both)
    routers.is_away = True
    taken = taken_of_all(routers, 200.0, both)
    assert 0.98 * 200 * RATE <= taken <= 200 * RATE + 4
    routers.is_away = False
    taken = taken_of_all(routers, 20.0, both)
    # The bucket has filled meanwhile; of what was spent only what is owed still counts.
    assert 0.9 * 20 * RATE <= taken <= 20 * RATE + BURST_S * RATE + 4


def test_what_is_owed_since_redis_went_away_is_owed_still_when_it_is_back() -> None:
    routers = Routers(1, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    routers.is_away = True
    routers.asks(0, tokens=1000)
    for _ in range(10):
        routers.pass_s(1.0)
    routers.is_away = False
    routers.pass_s(0.0)
    with pytest.raises(OverloadedError) as raised:
        routers.rates[0].begin("acme", routers.now_s)
    assert raised.value.retry_after_ms == pytest.approx(1000 * (1000 - 20) / RATE - 10_000, rel=0.01)


def test_what_is_spent_while_a_report_is_on_its_way_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def left() -> float:
        rates = TenantRates(lambda tenant: TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
        rates.spend("acme", 5, 0.0)
        spent = rates.to_tell(rates.tenants(), 0.0)
        rates.spend("acme", 7, 0.0)
        rates.told(spent, [15.0], 0.0)
        (after,) = rates.to_tell(rates.tenants(), 0.0)
        assert after.amount == 7
        # Of a part: what is left is not told to anybody.
        return rates._parts["acme"]["tokens_per_s"].balance

    assert left() == 8.0


def test_who_has_no_limits_is_not_remembered_and_who_is_full_again_is_forgotten() -> None:
    limits = {"acme": TenantLimits(requests_per_s=RATE, burst_s=BURST_S)}
    rates = TenantRates(lambda tenant: limits.get(tenant, UNLIMITED))
    for _ in range(100):
        rates.begin("zeta", 0.0)
        rates.spend("zeta", 10**9, 0.0)
    assert len(rates) == 0 and rates.to_tell(rates.tenants(), 0.0) == []
    assert rates.begin("acme", 0.0) and not rates.begin("acme", 0.0)
    spent = rates.to_tell(rates.tenants(), 0.0)
    assert [each.amount for each in spent] == [2.0]
    rates.told(spent, [18.0], 0.0)
    assert [each.amount for each in rates.to_tell(rates.tenants(), 0.1)] == [0.0]
    assert rates.to_tell(rates.tenants(), 10.0) == [] and len(rates) == 0


def test_a_router_that_sees_a_tenant_for_the_first_time_hears_of_its_debt_though_it_has_spent_nothing() -> None:
    routers = Routers(2, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    assert routers.asks(0, tokens=1000)
    routers.pass_s(0.0)
    assert routers.asks(1)
    routers.share(1)
    assert not routers.asks(1)


def test_limits_that_change_hold_from_the_next_request_on() -> None:
    limits = [TenantLimits(requests_per_s=1.0, burst_s=1.0)]
    rates = TenantRates(lambda tenant: limits[0])
    rates.begin("acme", 0.0)
    with pytest.raises(OverloadedError, match="requests_per_s is 1 "):
        rates.begin("acme", 0.0)
    limits[0] = TenantLimits(requests_per_s=100.0, burst_s=1.0)
    rates.begin("acme", 0.1)
    limits[0] = UNLIMITED
    rates.begin("acme", 0.1)
    assert rates.to_tell(rates.tenants(), 0.1) == [] and len(rates) == 0


def test_tenants_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten thousand would take a second.
    monkeypatch.setattr(tenant_rates, "_MOST_TENANTS", 5)
    rates = TenantRates(lambda tenant: TenantLimits(requests_per_s=RATE, tokens_per_s=RATE))
    for number in range(100):
        rates.begin(f"t{number}", 0.0)
        rates.spend(f"t{number}", 3, 0.0)
        rates.check_invariants()
    assert len(rates) == 5


def test_what_waits_for_a_slot_counts_at_its_router_until_it_has_one_or_gets_none() -> None:
    routers = Routers(1, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    rates = routers.rates[0]
    rates.waits("acme", 1000)
    routers.pass_s(0.0)
    with pytest.raises(OverloadedError) as raised:
        rates.begin("acme", routers.now_s)
    assert raised.value.retry_after_ms == pytest.approx((1000 - RATE * BURST_S) / RATE * 1000)
    rates.waits("acme", -1000)
    routers.pass_s(0.0)
    assert routers.asks(0, tokens=21)
    assert not routers.asks(0)
    rates.check_invariants()


def tokens_of_ten_minutes(cancelled: int) -> int:
    """Four prompts in each second are answered, as often as they are taken; so many more give up before they have a
    slot. One of them owes more than an hour."""
    routers = Routers(1, TenantLimits(tokens_per_s=RATE, burst_s=BURST_S))
    rates, large, spent = routers.rates[0], int(2 * MOST_DEBT_S * RATE), 0
    for _ in range(600):
        # Text is taken before its tokens are known.
        taken = 0
        while taken < 4 + cancelled and routers.asks(0):
            taken += 1
        given_up = max(taken - 4, 0)
        rates.waits("acme", given_up * large)
        for _ in range(taken - given_up):
            rates.spend("acme", large, routers.now_s)
            spent += large
        routers.pass_s(0.5)
        rates.waits("acme", -given_up * large)
        routers.pass_s(0.5)
    return spent


def test_prompts_that_give_up_waiting_bring_back_nothing_that_was_not_taken_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tokens_of_ten_minutes(cancelled=8) == tokens_of_ten_minutes(cancelled=0)

    def charged_at_once(self: TenantRates, tenant: str, tokens: int) -> None:
        # A planted bug is private: all tokens come back, also those that were forgotten beyond the most debt.
        self._spend(tenant, "tokens_per_s", tokens, self._parts[tenant]["tokens_per_s"].since_s)

    planted(monkeypatch, TenantRates, "waits", charged_at_once)
    assert tokens_of_ten_minutes(cancelled=8) > 100 * tokens_of_ten_minutes(cancelled=0)
