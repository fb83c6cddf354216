"""When those come back who were refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.tenant_shares import Claimant
from control_plane.placement.return_times import ReturnTimes

MOMENTS = st.lists(st.tuples(st.floats(0, 60), st.floats(0.001, 20), st.floats(0, 20)), max_size=40)


def test_those_refused_at_one_moment_come_back_one_after_the_other() -> None:
    times = ReturnTimes()
    assert [times.told(2.0, 0.5, 100.0) for _ in range(4)] == [2.0, 2.5, 3.0, 3.5]


def test_who_is_refused_later_comes_after_those_that_were_told_and_not_after_those_who_came() -> None:
    times = ReturnTimes()
    for _ in range(4):
        times.told(2.0, 0.5, 100.0)
    assert times.told(2.0, 0.5, 101.0) == pytest.approx(3.0)
    assert times.told(2.0, 0.5, 110.0) == 2.0


def test_nobody_is_sent_away_for_longer_than_half_a_minute_for_the_sake_of_others() -> None:
    times = ReturnTimes()
    told = [times.told(1.0, 8.0, 0.0) for _ in range(6)]
    assert told == [1.0, 9.0, 17.0, 25.0, 1.0, 9.0]


@given(MOMENTS)
def test_nobody_comes_back_before_one_would_be_in_time_or_half_a_minute_has_passed(
    moments: list[tuple[float, float, float]],
) -> None:
    times, now_s = ReturnTimes(), 0.0
    for in_time_s, takes_s, passed_s in moments:
        now_s += passed_s
        sooner_s = min(in_time_s, 30.0)
        assert sooner_s <= times.told(in_time_s, takes_s, now_s) <= sooner_s + 30.0 + 1e-9


def test_what_waits_sends_nobody_further_than_half_a_minute() -> None:
    assert [ReturnTimes().told(in_time_s, 0.5, 100.0) for in_time_s in (29.0, 120.0, 1e6)] == [29.0, 30.0, 30.0]


def test_each_tenant_comes_back_by_its_own_schedule() -> None:
    times = ReturnTimes()
    for _ in range(4):
        times.told(2.0, 0.5, 100.0, Claimant(0, "a"))
    assert times.told(2.0, 0.5, 100.0, Claimant(0, "b")) == 2.0
    assert times.told(2.0, 0.5, 100.0, Claimant(-1, "a")) == 2.0
    assert times.told(2.0, 0.5, 100.0, Claimant(0, "a")) == 4.0


def test_of_many_tenants_who_was_told_longest_ago_begins_anew() -> None:
    times = ReturnTimes()
    for number in range(5000):
        times.told(2.0, 0.5, 100.0, Claimant(0, f"tenant-{number}"))
        times.check_invariants()
    assert times.told(2.0, 0.5, 100.0, Claimant(0, "tenant-4999")) == 2.5
    assert times.told(2.0, 0.5, 100.0, Claimant(0, "tenant-0")) == 2.0
