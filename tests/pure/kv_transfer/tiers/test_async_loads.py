"""Which loads from host memory are asynchronous."""

import pytest

from kv_transfer.tiers.async_loads import AsyncLoads


def after_a_step_of(seconds: float) -> AsyncLoads:
    loads = AsyncLoads()
    loads.began("step", 100.0)
    loads.ended("step", 100.0 + seconds)
    return loads


@pytest.mark.parametrize(
    ("step_s", "load_s", "others", "is_cheaper"),
    [
        (0.010, 0.020, 0, False),
        (0.010, 0.020, 1, True),
        (0.200, 0.020, 1, False),
        (0.200, 0.020, 9, False),
        (0.200, 0.020, 11, True),
        (0.010, 0.0001, 64, False),
    ],
)
def test_a_load_goes_async_where_those_who_would_wait_lose_more_than_its_own_request(
    step_s: float, load_s: float, others: int, is_cheaper: bool
) -> None:
    assert after_a_step_of(step_s).is_cheaper(load_s, others) is is_cheaper


def test_before_the_first_step_nobody_waits_for_a_load_beside_others() -> None:
    assert AsyncLoads().is_cheaper(0.001, 1)


def test_a_step_that_began_while_another_one_was_under_way_has_waited_for_it() -> None:
    loads = AsyncLoads()
    loads.began("first", 0.0)
    loads.began("second", 0.001)
    loads.ended("first", 0.010)
    assert loads.step_s == pytest.approx(0.010)
    loads.ended("second", 0.018)
    assert loads.step_s == pytest.approx(0.008)


def test_a_step_behind_one_that_waited_for_a_load_has_not_taken_what_the_load_took() -> None:
    loads = AsyncLoads()
    loads.began("waits", 0.0, waits=True)
    loads.began("behind", 0.001)
    loads.ended("waits", 1.210)
    assert loads.step_s == 0, "it says nothing itself"
    loads.ended("behind", 1.220)
    assert loads.step_s == pytest.approx(0.010)


def test_of_steps_alike_that_are_taken_at_once_each_counts() -> None:
    loads = AsyncLoads()
    loads.began("sixteen", 1.0)
    loads.ended("sixteen", 1.16, alike=16)
    assert loads.step_s == pytest.approx(0.01)


def test_steps_that_never_end_and_unknown_ones_leave_nothing() -> None:
    loads = AsyncLoads()
    loads.ended("unknown", 5.0)
    assert loads.step_s == 0
    loads.began("lost", 0.0)
    loads.began("step", 1.0)
    loads.ended("step", 1.5)
    assert loads.step_s == pytest.approx(0.5)
    loads.ended("lost", 9.0)
    assert loads.step_s == pytest.approx(0.5)
