"""The median gap: against the exact one, and how fast it follows."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.tiers.reuse_gaps import ReuseGaps
from tests.examples import examples

# A quarter of an octave, on both sides.
CLOSE = 2**0.25


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=20))
@examples(20, few=5)
def test_it_is_the_median_to_a_quarter_octave(gaps: list[float]) -> None:
    measured = ReuseGaps(500)
    for _ in range(3000):
        measured.add(gaps)
    low, high = statistics.median_low(gaps), statistics.median_high(gaps)
    assert low / CLOSE <= measured.median_requests() <= high * CLOSE


@pytest.mark.parametrize("guess", [1, 7, 500, 10_000_000])
def test_it_begins_with_the_guess(guess: int) -> None:
    assert guess / CLOSE <= ReuseGaps(guess).median_requests() <= guess * CLOSE


def test_a_few_gaps_do_not_outweigh_the_guess_and_many_do() -> None:
    measured = ReuseGaps(500)
    measured.add([3.0] * 900)
    assert measured.median_requests() > 400
    measured.add([3.0] * 900)
    assert measured.median_requests() < 4


def test_prompts_without_reuse_change_nothing() -> None:
    measured = ReuseGaps(500)
    before = measured.median_requests()
    for _ in range(10_000):
        measured.add([])
    assert measured.median_requests() == before


def test_what_was_long_ago_counts_no_more() -> None:
    measured = ReuseGaps(500)
    measured.add([3.0] * 100_000)
    for _ in range(10_000):
        measured.add([300.0])
    assert measured.median_requests() == pytest.approx(300, rel=0.2)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1e9, 1e30]), max_size=10), max_size=20))
def test_it_stays_a_number_whatever_comes(prompts: list[list[float]]) -> None:
    measured = ReuseGaps(500)
    for gaps in prompts:
        measured.add(gaps)
        assert 1 <= measured.median_requests() <= 2**32
        assert math.isfinite(measured.median_requests())
