"""Transfers over an imitated link: latency, bandwidth, and equal shares of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imitated_gpu.link import SharedLink

RATE = 1000.0
LATENCY_S = 0.5


def over_s(link: SharedLink, name: str, from_s: float) -> float:
    """When a transfer is over, looked at every millisecond."""
    return next(now_s for step in range(100_000) if link.is_over(name, now_s := from_s + step / 1000))


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    link = SharedLink(RATE, LATENCY_S)
    link.begin("a", 2000, 10.0)
    assert not link.is_over("a", 12.49)
    assert link.is_over("a", 12.51)


def test_two_at_once_have_half_of_it_each_and_the_rest_goes_to_the_one_that_is_left() -> None:
    link = SharedLink(RATE, 0.0)
    link.begin("short", 500, 10.0)
    link.begin("long", 1500, 10.0)
    assert over_s(link, "short", 10.0) == pytest.approx(11.0, abs=0.002)
    assert over_s(link, "long", 10.0) == pytest.approx(12.0, abs=0.002)


def test_one_that_is_forgotten_takes_nothing_any_more() -> None:
    link = SharedLink(RATE, 0.0)
    link.begin("a", 1000, 10.0)
    link.begin("b", 1000, 10.0)
    link.forget("b", 11.0)
    assert link.is_over("b", 11.0)
    assert over_s(link, "a", 11.0) == pytest.approx(11.5, abs=0.002)


def test_nothing_takes_its_latency_alone() -> None:
    link = SharedLink(RATE, LATENCY_S)
    link.begin("a", 0, 10.0)
    assert not link.is_over("a", 10.49)
    assert link.is_over("a", 10.51)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000)), min_size=1, max_size=8))
def test_together_they_take_what_their_bytes_take_once_all_have_begun(transfers: list[tuple[float, int]]) -> None:
    """The link is never idle while one is under way, however it is shared and whenever it is looked at."""
    link, end_s = SharedLink(RATE, 0.0), 0.0
    for number, (at_s, size) in enumerate(sorted(transfers)):
        link.begin(number, size, at_s)
        end_s = max(end_s, at_s) + size / RATE
    assert not all(link.is_over(number, end_s - 1e-2) for number in range(len(transfers)))
    assert all(link.is_over(number, end_s + 1e-2) for number in range(len(transfers)))


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 1 << 30)), min_size=1, max_size=30), st.floats(0, 1e7))
def test_however_fast_the_link_and_however_late_the_clock_all_come_to_an_end(
    transfers: list[tuple[float, int]], from_s: float
) -> None:
    """A fast link moves many bytes in the least time that the clock tells apart."""
    link = SharedLink(45e9, 0.001)
    for number, (at_s, size) in enumerate(sorted(transfers)):
        link.begin(number, size, from_s + at_s)
    last_s = from_s + 0.02
    for step in range(200):
        last_s = from_s + 0.02 + step * 0.01
        if all(link.is_over(number, last_s) for number in range(len(transfers))):
            break
    assert last_s <= from_s + 0.04 + sum(size for _, size in transfers) / 45e9
