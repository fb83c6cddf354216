"""The room of the hotness filter: it grows to its bound, refuses the rest, forgets the cold, and loses nothing."""

import numpy as np
import pytest

from kv_transfer.tiers import hotness_filter
from kv_transfer.tiers.hotness_filter import HotnessFilter
from tests.planting import planted
from tests.pure.kv_transfer.tiers.filter_keys import PROMPT_BLOCKS, frequencies, key_range, keys_of, touch_prompts


def test_growth_keeps_every_entry_and_ends_at_a_bound_of_memory() -> None:
    hotness = HotnessFilter(50_000, fingerprint_bits=32, initial_entries=1)
    keys = key_range(0, 50_000)
    small_bytes = hotness.memory_bytes
    for first in range(0, len(keys), PROMPT_BLOCKS):
        hotness.touch(keys[first : first + PROMPT_BLOCKS], first_depth=first)
    hotness.check_invariants()
    records = hotness.look_up(keys)
    assert (records.frequency == 1).all()
    assert (records.depth_blocks == keys).all()
    assert len(hotness) == 50_000
    most_bytes = hotness.memory_bytes
    assert small_bytes < 100 < most_bytes == 16_384 * 4 * 15
    assert touch_prompts(hotness, key_range(10**6, 10_000)) == 10_000
    assert hotness.memory_bytes == most_bytes


def test_what_does_not_fit_is_refused_and_nothing_that_was_stored_is_lost() -> None:
    hotness = HotnessFilter(20, fingerprint_bits=32)
    assert hotness.touch(key_range(0, 18)).tolist() == [1] * 18
    assert hotness.touch(key_range(15, 10)).tolist() == [2, 2, 2, 1, 1, 0, 0, 0, 0, 0]
    assert (hotness.refused, hotness.forgotten, len(hotness)) == (5, 0, 20)
    assert hotness.look_up(key_range(0, 25)).frequency.tolist() == [1] * 15 + [2] * 3 + [1] * 2 + [0] * 5
    hotness.check_invariants()


def test_a_full_filter_forgets_what_is_cold_but_not_what_the_same_call_touches() -> None:
    hotness = HotnessFilter(4, fingerprint_bits=32, max_age_epochs=2)
    hotness.touch(keys_of(1, 2, 3))
    hotness.advance_epoch()
    hotness.touch(keys_of(4))
    hotness.advance_epoch()
    assert hotness.touch(keys_of(1, 5)).tolist() == [2, 1]
    assert frequencies(hotness, 1, 2, 3, 4, 5) == [2, 0, 0, 1, 1]
    assert hotness.forgotten == 2


def test_a_full_filter_looks_for_cold_entries_once_in_an_epoch() -> None:
    sweeps = []

    class Noted(HotnessFilter):
        def forget_cold(self) -> int:
            sweeps.append(self.epoch)
            return super().forget_cold()

    hotness = Noted(4, fingerprint_bits=32)
    for _ in range(3):
        for number in range(0, 100, 10):
            hotness.touch(key_range(number, 10))
        hotness.advance_epoch()
    assert sweeps == [1, 2], "in the first epoch nothing can be cold"


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters may fill up: 240 entries get 256 slots."""
    # A filter of the usual load grows before a relocation fails; its constructor is full.
    monkeypatch.setattr(hotness_filter, "MAX_LOAD", 0.95)


def check_that_failed_relocations_lose_nothing() -> None:
    """240 keys for 256 slots, with so few tries that some are refused. The depth of a key is its number."""
    hotness = HotnessFilter(240, fingerprint_bits=32, max_relocations=2)
    stored = [number for number in range(240) if hotness.touch(keys_of(number), first_depth=number)[0]]
    hotness.check_invariants()
    assert len(stored) == len(hotness) == 240 - hotness.refused < 240
    records = hotness.look_up(key_range(0, 240))
    assert np.flatnonzero(records.frequency).tolist() == stored, "one is lost that was stored before"
    assert records.depth_blocks[stored].tolist() == stored, "one has the values of another"


@pytest.mark.usefixtures("crowded")
def test_a_relocation_that_fails_loses_nothing() -> None:
    check_that_failed_relocations_lose_nothing()


@pytest.mark.usefixtures("crowded")
def test_negative_control_a_relocation_that_is_not_undone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, HotnessFilter, "_undo", lambda self, path, moving: None)
    with pytest.raises(AssertionError, match="one is lost that was stored before"):
        check_that_failed_relocations_lose_nothing()


@pytest.mark.usefixtures("crowded")
def test_relocation_fills_the_filter_to_its_last_entry() -> None:
    hotness = HotnessFilter(240, fingerprint_bits=32)
    assert touch_prompts(hotness, key_range(0, 240)) == 0
    assert hotness.load_factor == 240 / 256
    hotness.check_invariants()


def test_removed_keys_are_unknown_and_leave_room() -> None:
    hotness = HotnessFilter(4, fingerprint_bits=32)
    hotness.touch(keys_of(1, 2, 3, 4))
    assert hotness.remove(keys_of(2, 9, 2, 4)) == 2
    assert frequencies(hotness, 1, 2, 3, 4) == [1, 0, 1, 0]
    assert hotness.touch(keys_of(5, 6, 7)).tolist() == [1, 1, 0]
