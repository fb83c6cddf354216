"""What of a worker's prompts is computed after one that comes, as engines take turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import WorkerId
from cluster_core.tenant_shares import Claimant
from control_plane.fleet.loads import Loads, Work
from control_plane.fleet.other_routers import OtherRouters, told_lines
from control_plane.fleet.tenant_lines import Line, behind, together

POLITE, GREEDY = Claimant(0, "polite"), Claimant(0, "greedy")
SECONDS = st.floats(0.001, 100.0)
LINES = st.dictionaries(
    st.builds(Claimant, st.integers(-2, 2), st.sampled_from(["", "a", "b", "c"])),
    st.builds(Line, st.integers(1, 50), st.integers(1, 10_000), SECONDS, st.floats(0.1, 10.0)),
)


def work(whose: Claimant, seconds: float, weight: float = 1.0) -> Work:
    return Work(100, 90, seconds, whose=whose, weight=weight)


@given(SECONDS, SECONDS, st.builds(Claimant, st.integers(-2, 2), st.sampled_from(["", "a"])))
def test_of_one_tenant_and_one_priority_nothing_is_behind(pending_s: float, own_s: float, whose: Claimant) -> None:
    assert behind({whose: Line(3, 300, pending_s)}, whose, 1.0, own_s) == (0.0, 0.0, 0.0)


@given(LINES, st.integers(-2, 2), SECONDS, st.floats(0.1, 10.0))
def test_lower_numbers_are_before_higher_ones_behind_and_others_by_weight(
    lines: dict[Claimant, Line], priority: int, own_s: float, weight: float
) -> None:
    whose = Claimant(priority, "a")
    mine = lines.get(whose, Line()).pending_s
    expected = 0.0
    for other, line in lines.items():
        if other.priority == priority and other != whose:
            expected += max(line.pending_s - (own_s + mine) * line.weight / weight, 0.0)
        # Best effort is no part of the queue that others are told of.
        elif other.priority > priority and (priority > 0 or other.priority <= 0):
            expected += line.pending_s
    seconds, requests, tokens = behind(lines, whose, weight, own_s)
    assert seconds == pytest.approx(expected)
    assert 0 <= requests <= sum(line.requests for line in lines.values()) + 1e-6
    assert 0 <= tokens <= sum(line.tokens for line in lines.values()) + 1e-6


def test_a_tenant_of_twice_the_weight_has_half_as_much_of_another_one_before_it() -> None:
    lines = {GREEDY: Line(10, 1000, 10.0)}
    assert behind(lines, POLITE, 1.0, 1.0) == pytest.approx((9.0, 9.0, 900.0))
    assert behind(lines, POLITE, 2.0, 1.0) == pytest.approx((9.5, 9.5, 950.0))
    lines[POLITE] = Line(1, 100, 3.0)
    assert behind(lines, POLITE, 1.0, 1.0) == pytest.approx((6.0, 6.0, 600.0))


@given(st.lists(st.tuples(st.sampled_from([POLITE, GREEDY, Claimant(1, "greedy"), None]), SECONDS), max_size=20))
def test_what_has_come_and_gone_leaves_no_line(works: list[tuple[Claimant | None, float]]) -> None:
    loads = Loads()
    row = loads.take_row()
    begun = [Work(100, 90, seconds, whose=whose) for whose, seconds in works]
    for each in begun:
        loads.begin(row, each, 0.0)
    assert loads.lines.of(row).keys() == {whose for whose, _ in works if whose is not None}
    for number, each in enumerate(begun):
        if number % 2:
            loads.prefilled(row, each, 1.0)
        else:
            loads.end(row, each, 1.0)
    assert not loads.lines.of(row)


def test_who_has_a_workers_row_next_has_none_of_its_lines() -> None:
    loads = Loads()
    row = loads.take_row()
    loads.begin(row, work(GREEDY, 1.0), 0.0)
    loads.give_back(row)
    for _ in range(8):
        assert not loads.lines.of(loads.take_row())


def test_routers_tell_each_other_whose_prompts_wait() -> None:
    loads = Loads()
    row = loads.take_row()
    for each in (work(GREEDY, 1.0, 2.0), work(GREEDY, 0.5, 2.0), work(Claimant(-3, "vip"), 0.25)):
        loads.begin(row, each, 0.0)
    others, worker_id = OtherRouters(2.0), WorkerId("w")
    for name in ("one", "two"):
        told = wire.WorkerShare(worker_id=worker_id, generation=1, lines=told_lines(loads.lines.of(row)))
        others.heard(name, wire.RouterLoads(number=1, workers=[told]), 0.0)
    assert together(others.lines(worker_id, 1)) == {
        GREEDY: Line(4, 400, 3.0, 2.0),
        Claimant(-3, "vip"): Line(2, 200, 0.5, 1.0),
    }
    assert others.lines(worker_id, 2) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_line_that_is_no_number_is_none(bad: float) -> None:
    others = OtherRouters(2.0)
    lines = [wire.TenantLine(tenant="a", weight=1, pending_s=bad), wire.TenantLine(tenant="b", weight=bad, pending_s=1)]
    told = wire.WorkerShare(worker_id="w", generation=1, lines=lines)
    others.heard("one", wire.RouterLoads(number=1, workers=[told]), 0.0)
    assert together(others.lines("w", 1)) == {}
