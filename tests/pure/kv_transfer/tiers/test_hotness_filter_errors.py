"""The errors of the hotness filter: keys taken for one another as rarely as theory says, and damage that is noticed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_transfer.tiers.hotness_filter import HotnessFilter, Keys, other_addresses
from tests.pure.kv_transfer.tiers.filter_keys import key_range, keys_of, touch_prompts


def false_positive_ratio(kind: Callable[..., HotnessFilter], bits: int, probes: int) -> float:
    """The measured rate, over the rate that theory gives, of a filter with 6,500 keys in 8,192 slots."""
    hotness = kind(6500, fingerprint_bits=bits, initial_entries=6500)
    touch_prompts(hotness, key_range(0, 6500))
    taken = sum(
        int((hotness.look_up(key_range(10**9 + first, 20_000)).frequency > 0).sum())
        for first in range(0, probes, 20_000)
    )
    return taken / probes / (8 / (1 << bits) * 6500 / 8192)


@pytest.mark.parametrize(("bits", "probes"), [(8, 20_000), (12, 200_000), (16, 1_000_000)])
def test_false_positives_are_as_rare_as_theory_says(bits: int, probes: int) -> None:
    assert 0.5 < false_positive_ratio(HotnessFilter, bits, probes) < 2


def test_the_bound_of_false_positives_follows_width_and_load() -> None:
    hotness = HotnessFilter(6500, fingerprint_bits=12, initial_entries=6500)
    assert hotness.false_positive_bound == 0
    hotness.touch(key_range(0, 4096))
    assert hotness.false_positive_bound == pytest.approx(8 / 4096 * 0.5, rel=0.01)


class AsPublished(HotnessFilter):
    """Equations 3 and 4 as they are printed: b1 = hash(f), and so b2 = b1 xor hash(f) = 0."""

    def _hash(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
        fingerprints, addresses = super()._hash(keys)
        return fingerprints, other_addresses(fingerprints, addresses) ^ addresses


def test_negative_control_with_the_published_equations_every_key_is_taken_for_another() -> None:
    ratio = false_positive_ratio(AsPublished, 8, 20_000)
    assert not 0.5 < ratio < 2
    assert ratio > 30
    hotness = AsPublished(6500, fingerprint_bits=8, initial_entries=6500)
    touch_prompts(hotness, key_range(0, 6500))
    assert len(hotness) <= 255, "one entry for each fingerprint is all that fits"


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_the_other_bucket_of_the_other_bucket_is_the_first_and_they_differ(bits: int) -> None:
    # A lookup shows neither fingerprints nor addresses.
    fingerprints, addresses = HotnessFilter(100, fingerprint_bits=bits)._hash(key_range(0, 10_000))
    others = other_addresses(fingerprints, addresses)
    assert (other_addresses(fingerprints, others) == addresses).all()
    assert ((addresses ^ others) & 1).all(), "they differ in every size of the filter"
    assert fingerprints.min() >= 1
    assert fingerprints.max() < 2**bits


def test_consecutive_keys_spread_over_all_buckets() -> None:
    # A lookup shows neither fingerprints nor addresses.
    _, addresses = HotnessFilter(100)._hash(key_range(0, 64_000))
    counts = np.bincount(addresses & 63, minlength=64)
    assert 800 < counts.min() <= counts.max() < 1200


def random_life(seed: int, fingerprint_bits: int = 16) -> HotnessFilter:
    hotness = HotnessFilter(
        400, fingerprint_bits=fingerprint_bits, initial_entries=1, max_age_epochs=90, rng=random.Random(seed)
    )
    draw = random.Random(5)
    for _ in range(40):
        hotness.touch(key_range(draw.randrange(600), draw.randrange(30)), first_depth=draw.randrange(50))
        hotness.advance_epoch(draw.randrange(10))
        hotness.check_invariants()
    return hotness


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_books_are_right_where_many_keys_share_entries(bits: int) -> None:
    assert 0 < len(random_life(1, bits)) < len(random_life(1))


def columns(hotness: HotnessFilter) -> Any:
    # Tests compare filters slot by slot, and damage a slot; a lookup shows no slots.
    return hotness._columns


def test_the_same_calls_and_seed_give_the_same_content_slot_by_slot() -> None:
    first, second, other = random_life(1), random_life(1), random_life(2)
    assert all((one == two).all() for one, two in zip(columns(first), columns(second), strict=True))
    assert any((one != two).any() for one, two in zip(columns(first), columns(other), strict=True)), "nothing moved"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("fingerprint", 0, "lost or counted twice"),
        ("address", 1 << 31 | 1, "foreign bucket"),
        ("frequency", 0, "out of bounds"),
    ],
)
def test_damage_is_noticed(column: str, value: int, message: str) -> None:
    hotness = HotnessFilter(1000, initial_entries=1000)
    hotness.touch(key_range(0, 100))
    slot = np.flatnonzero(columns(hotness).fingerprint)[0]
    assert slot < 4, "address 1 is not that of bucket 0"
    getattr(columns(hotness), column)[slot] = value
    with pytest.raises(AssertionError, match=message):
        hotness.check_invariants()


def test_two_entries_that_cannot_be_told_apart_are_noticed() -> None:
    hotness = HotnessFilter(1000, initial_entries=1000)
    hotness.touch(keys_of(1))
    slot = int(np.flatnonzero(columns(hotness).fingerprint)[0])
    for column in columns(hotness):
        column[slot + 1] = column[slot]
    # The copy is counted: a wrong count alone would be noticed, too.
    hotness._entries += 1
    with pytest.raises(AssertionError, match="cannot be told apart"):
        hotness.check_invariants()
