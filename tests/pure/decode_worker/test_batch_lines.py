"""Who is in turn for the decode batch, what it costs to know, what others wait for, and that policies are asked."""

from collections import Counter
from typing import Any

import pytest

from cluster_core.engine_jobs import TenantShare
from cluster_core.tenant_shares import FairOrder
from decode_worker.batch_members import Cause, Member, Plan, Reason
from decode_worker.batch_shares import SLACK_TOKENS, BatchShares
from decode_worker.batching import Batching
from tests.planting import planted
from tests.pure.decode_worker.batch_steps import BOUND_S, Threshold, admit, hashes_of
from tests.pure.decode_worker.tenant_backlog import MANY, Backlog, joins_after

A, B = TenantShare("a"), TenantShare("b")


def test_who_is_preempted_costs_as_much_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that is preempted again and again is not furthest behind for ever."""

    def who_joins() -> str:
        batching = Batching(Threshold(99), BOUND_S, slack_tokens=0)
        batching.insert("a", [], 0.0, tokens=1000, tenant=A)
        for number in range(4):
            batching.insert(f"b{number}", [], 0.0, tokens=1500, tenant=B)
        assert admit(batching, 0.0, 2) == ["a", "b0"]
        batching.preempted("a", 0.0)
        assert admit(batching, 0.0, 1) == ["a"]
        batching.preempted("a", 0.0)
        return admit(batching, 0.0, 1)[0]

    assert who_joins() == "b1", "a has had 1,000 tokens twice, and b 1,500"
    joined = BatchShares.joined
    known: set[str] = set()

    def once(self: BatchShares, member: Member) -> None:
        if member.request_id not in known:
            known.add(member.request_id)
            joined(self, member)

    planted(monkeypatch, BatchShares, "joined", once)
    assert who_joins() == "a"


@pytest.mark.parametrize("weight", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("by_arrival", [False, True])
def test_the_slack_does_not_depend_on_the_scale_of_weights(weight: float, by_arrival: bool) -> None:
    tried = Backlog({"a": weight, "b": weight}, {"a": 3000, "b": 3000}, places=1)
    for tenant in "ab":
        for _ in range(60):
            tried.come(tenant)
    joined = "".join(name[0] for _ in range(60) for name in tried.step(by_arrival=by_arrival))
    assert joined.index("b") == 1 + SLACK_TOKENS // 3000


def test_whoever_waits_for_a_slack_waits_for_that_many_tokens() -> None:
    """Not for as many of its own by weight: that would be 100 times as many here."""
    tried = Backlog({"flood": 1.0, "few": 0.01}, {"flood": 3000, "few": 3000}, places=1)
    for _ in range(100):
        tried.come("flood")
    assert joins_after(tried, tried.come("few")) == 1 + SLACK_TOKENS // 3000


def looked_at(monkeypatch: pytest.MonkeyPatch, tenants: int, ahead: int, *, by_arrival: bool) -> int:
    """How often it is asked where a tenant stands, or whether a request is in turn, for a plan of 32."""
    looks = 0

    def counted(owner: type, name: str) -> None:
        asked = getattr(owner, name)

        def count(self: Any, *given: Any) -> Any:
            nonlocal looks
            looks += 1
            return asked(self, *given)

        planted(monkeypatch, owner, name, count)

    names = [str(number) for number in range(tenants)]
    tried = Backlog(dict.fromkeys([*names, "flood"], 1.0), dict.fromkeys(names, 1000) | {"flood": 30_000}, 1)
    for _ in range(ahead):
        tried.come("flood")
    tried.step()
    for number in range(100):
        tried.come(names[number % tenants])
    for name in names[100:]:
        tried.come(name)
    # Nothing runs that shares anything with the one ahead: those that wait longest are looked for.
    tried.batching.gone(tried.running.pop())
    with monkeypatch.context() as planting:
        monkeypatch = planting
        counted(FairOrder, "start")
        counted(BatchShares, "is_in_turn")
        plan = tried.batching.plan(tried.now_s, 32, by_arrival=by_arrival)
    assert len(plan.joining) == 32
    return looks


@pytest.mark.parametrize("by_arrival", [False, True])
@pytest.mark.parametrize(("tenants", "ahead"), [(2, 20), (500, 20), (2, 1000)])
def test_no_more_is_looked_at_for_a_place_than_the_line_that_moves(
    monkeypatch: pytest.MonkeyPatch, tenants: int, ahead: int, by_arrival: bool
) -> None:
    """However many tenants wait, and requests of one that is ahead."""
    assert looked_at(monkeypatch, tenants, ahead, by_arrival=by_arrival) <= 32 * 4


def test_one_tenant_with_two_priorities_is_alone_in_each() -> None:
    tried = Backlog({"a": 1.0, "b": 1.0}, {"a": MANY, "b": MANY})
    tried.come("a")
    late = tried.come("b", priority=1)
    seen = [tried.batching.shares.are_several]
    tried.come("a", priority=1)
    seen.append(tried.batching.shares.are_several)
    tried.batching.gone(late)
    seen.append(tried.batching.shares.are_several)
    assert seen == [False, True, False]


def play_one_that_is_ahead() -> Batching:
    """Ten long prompts of one that has little weight, beside another that always waits; each cause is that of the
    requests."""
    tried = Backlog({"a": 0.1, "b": 1.0}, {"a": 30_000, "b": 3000}, places=4)
    for _ in range(10):
        tried.come("a")
    batching = tried.batching
    for _ in range(500):
        while sum(each.tenant.tenant_id == "b" for each in batching.waiting()) < 3:
            tried.come("b")
        tried.step()
        causes = Counter(each.cause for each in batching.waiting())
        assert batching.waiting_by_cause() == {cause: causes[cause] for cause in Cause}
    return batching


def test_what_waits_for_other_tenants_is_not_held_by_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    batching = play_one_that_is_ahead()
    assert batching.counters.wait_s[Cause.SHARE] > 5 * BOUND_S
    assert batching.counters.longest_held_s <= BOUND_S
    assert batching.waiting_by_cause()[Cause.SHARE] > 0
    # A planted bug: it is not told how long.
    planted(monkeypatch, BatchShares, "at", lambda self, now_s: None)
    assert play_one_that_is_ahead().counters.longest_held_s > 5 * BOUND_S


def out_of_turn(batching: Batching, places: int = 1) -> Plan:
    """Four of a that share eight chunks run, and a is out of turn; those of b share four or five with them."""
    for number in range(8):
        batching.insert(f"a{number}", hashes_of(f"aaaaaaaa{number}"), 0.0, tokens=20_000, tenant=A)
    for _ in range(4):
        admit(batching, 0.0, 1)
    for number in range(8):
        batching.insert(f"b{number}", hashes_of(f"aaaabbb{number}"), 0.0, tokens=100_000, tenant=B)
    batching.insert("best", hashes_of("aaaaab"), 0.0, tokens=100_000, tenant=B)
    return batching.plan(0.1, places)


def test_the_stop_policy_is_asked_about_the_best_of_those_in_turn() -> None:
    stopped = out_of_turn(Batching(Threshold(0), BOUND_S))
    assert stopped.stop is not None and not stopped.joining
    (joining,) = out_of_turn(Batching(Threshold(99), BOUND_S)).joining
    assert (joining.member.request_id, joining.reason) == ("best", Reason.SHARE)
    assert joining.decision is not None


def test_overdue_requests_have_a_claim_in_turn_alone() -> None:
    batching = Batching(Threshold(0), BOUND_S)
    plan = out_of_turn(batching, places=20)
    batching.settle(plan, [], [], 0.1)
    (joining,) = batching.plan(0.1 + BOUND_S, 1).joining
    assert (joining.member.tenant, joining.reason) == (B, Reason.OVERDUE)


def test_one_in_turn_waits_for_its_prefix_as_well() -> None:
    """Else it would be pulled twice, because others are ahead."""
    batching = Batching(Threshold(99), BOUND_S, lambda chunk: chunk in resident, slack_tokens=0)
    resident = set(hashes_of("aaaa1"))
    batching.insert("a0", hashes_of("aaaa0"), 0.0, tokens=1000, tenant=A)
    batching.insert("b0", hashes_of("bbbb0"), 0.0, tokens=100, tenant=B, pulls=True)
    batching.insert("a1", hashes_of("aaaa1"), 0.0, tokens=1000, tenant=A)
    batching.insert("b1", hashes_of("bbbb1"), 0.0, tokens=100, tenant=B, pulls=True)
    plan = batching.plan(0.0, 2)
    assert plan.request_ids == ["a0", "b0"]
    batching.settle(plan, plan.request_ids, ["b0"], 0.0)
    assert admit(batching, 0.1, 1) == []
    assert batching.waiting_by_cause()[Cause.PREFIX] == 1
    batching.loaded("b0")
    resident.update(hashes_of("bbbb0"))
    assert admit(batching, 0.2, 1) == ["b1"]
