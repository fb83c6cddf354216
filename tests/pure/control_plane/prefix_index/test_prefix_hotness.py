"""The hotness of prefixes: rates that halve, who is hottest, and who gets into a full table."""

import math

import numpy as np
import pytest

from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange
from tests.pure.control_plane.prefix_index.small_index import HALF_LIFE_S, device, index, keys, matched


def test_a_table_full_of_what_was_asked_for_once_lets_in_what_is_asked_for_now() -> None:
    found = index(entries=1024)
    rng = np.random.default_rng(5)
    for second in range(200):
        found.accessed(rng.integers(1, 2**64, 64, dtype=np.uint64), float(second))
    hot = keys(*range(1, 33))
    for second in range(200, 203):
        found.accessed(hot, float(second))
        found.apply("a", ClaimChange(device_stored=hot))
    assert matched(found, "a", hot) == (32, 32, 32)
    assert (found.hotness(hot, 203.0) > 0).all()


@pytest.mark.parametrize("by_requests", [True, False])
def test_requests_and_claims_each_get_into_a_table_full_of_what_was_asked_for_once(by_requests: bool) -> None:
    found = index(entries=1024)
    rng = np.random.default_rng(5)
    for second in range(200):
        found.accessed(rng.integers(1, 2**64, 64, dtype=np.uint64), float(second))
    new = keys(*range(1, 33))
    if by_requests:
        found.accessed(new, 200.0)
        assert found.hotness(new, 200.0) == pytest.approx([math.log(2) / HALF_LIFE_S] * 32, rel=1e-3)
    else:
        found.apply("a", ClaimChange(device_stored=new))
        assert len(found.claims("a")[0]) == 32


def test_a_rate_is_requests_a_second_and_halves() -> None:
    found = index()
    for second in range(int(HALF_LIFE_S) * 12):
        found.accessed(keys(1, 2), float(second))
        if second % 2:
            found.accessed(keys(1), float(second))
    now_s = HALF_LIFE_S * 12.0
    first, second_chunk, unknown = found.hotness(keys(1, 2, 3), now_s)
    assert first == pytest.approx(1.5, rel=0.03) and second_chunk == pytest.approx(1.0, rel=0.03) and unknown == 0
    assert found.hotness(keys(2), now_s + HALF_LIFE_S)[0] == pytest.approx(second_chunk / 2, rel=1e-3)


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0, 1e9, -1e9])
def test_a_clock_that_is_set_changes_nothing_of_what_is_hot(by_s: float) -> None:
    found = index()
    found.apply("a", device(3))
    for second in range(20):
        found.accessed(keys(1), float(second))
    before = found.hotness(keys(1), 20.0)[0]
    found.clock_set(by_s)
    assert found.hotness(keys(1, 3), 20.0 + by_s) == pytest.approx([before, 0.0])
    found.accessed(keys(2), 20.0 + by_s)
    found.apply("a", device(4))
    assert found.hotness(keys(2, 3, 4), 20.0 + by_s) == pytest.approx([math.log(2) / HALF_LIFE_S, 0.0, 0.0], rel=0.05)


def test_rates_stay_right_after_years() -> None:
    found = index()
    start_s = 1.7e9
    for year in range(3):
        at_s = start_s + year * 3.15e7
        for second in range(500):
            found.accessed(keys(1), at_s + second)
        expected = (1 - 2 ** (-500 / HALF_LIFE_S)) * 1.0
        assert found.hotness(keys(1), at_s + 500)[0] == pytest.approx(expected, rel=0.03)


def test_claims_from_before_the_first_request_are_not_the_coldest() -> None:
    start_s = 1.7e9
    found = PrefixIndex(1024, HALF_LIFE_S, start_s)
    found.join("a", 1)
    held = keys(*range(1, 100))
    found.apply("a", ClaimChange(device_stored=held))
    found.accessed(keys(500), start_s + 1)
    rng = np.random.default_rng(6)
    for _ in range(40):
        found.accessed(rng.integers(1, 2**64, 64, dtype=np.uint64), start_s - 20 * HALF_LIFE_S)
    assert matched(found, "a", held)[0] == 99, "what was asked for long ago is colder"


def test_hottest_are_prefixes_not_chunks() -> None:
    found = index()
    found.apply("a", device(1, 2))
    found.apply("b", ClaimChange(host_stored=keys(1, 2)))
    for number in range(50):
        found.accessed(keys(1, 2, 100 + number), 0.0)
    found.accessed(keys(7), 0.0)
    hottest = found.hottest(3, 0.0)

    assert hottest[0].key == int(keys(2)[0]) and hottest[0].chunks == 2
    assert (hottest[0].device, hottest[0].host) == (("a",), ("b",))
    assert hottest[0].rate == pytest.approx(50 * math.log(2) / HALF_LIFE_S, rel=0.01)
    assert hottest[1].rate == pytest.approx(math.log(2) / HALF_LIFE_S, rel=0.1)
    assert len(found.hottest(100, 0.0)) == 52


def test_hotness_is_restored_once_however_often() -> None:
    old, new = index(), index()
    for second in range(100):
        old.accessed(keys(1, 2), float(second))
        old.accessed(keys(1), float(second))
    counts = np.log2(old.hotness(keys(1, 2), 100.0) * HALF_LIFE_S / math.log(2)).astype(np.float32)

    new.restore_hotness(keys(1, 2), counts, 100.0)
    new.restore_hotness(keys(1, 2), counts, 100.0)

    assert new.hotness(keys(1, 2), 200.0) == pytest.approx(old.hotness(keys(1, 2), 200.0), rel=1e-3)


def test_a_flood_of_prompts_that_nobody_repeats_does_not_displace_a_hot_one() -> None:
    found = index(entries=2048)
    hot = keys(*range(1, 40))
    found.apply("a", ClaimChange(device_stored=hot))
    rng = np.random.default_rng(3)
    for second in range(60):
        found.accessed(hot, float(second))
        for _ in range(10):
            flood = rng.integers(1, 2**64, 64, dtype=np.uint64)
            found.accessed(flood, float(second))
            found.apply("b", ClaimChange(device_stored=flood))
    assert found.dropped > 30_000 and found.entries <= found.capacity
    assert matched(found, "a", hot) == (39, 39, 39)
    found.check_invariants()
