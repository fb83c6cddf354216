"""The hotness filter against a plain dictionary, its promises about room and errors, and how much work it is."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.tiers import hotness_filter
from kv_transfer.tiers.hotness_filter import HotnessFilter, Keys, other_addresses
from tests.counting import lines_run
from tests.examples import examples

PROMPT_BLOCKS = 312
UNIVERSE = np.arange(60, dtype=np.uint64)


def keys_of(*numbers: int) -> Keys:
    return np.array(numbers, np.uint64)


def key_range(first: int, count: int) -> Keys:
    return np.arange(first, first + count, dtype=np.uint64)


def frequencies(hotness: HotnessFilter, *numbers: int) -> list[int]:
    found: list[int] = hotness.look_up(keys_of(*numbers)).frequency.tolist()
    return found


def touch_prompts(hotness: HotnessFilter, keys: Keys) -> int:
    """Touches all keys, those of one prompt at a time; returns how many were refused."""
    refused = 0
    for first in range(0, len(keys), PROMPT_BLOCKS):
        refused += int((hotness.touch(keys[first : first + PROMPT_BLOCKS]) == 0).sum())
    return refused


class FilterMachine(RuleBasedStateMachine):
    """Fingerprints of 32 bits, so that no two of the keys here are mistaken for one another.

    Any 50 of the keys fit into the 16 buckets that 50 entries get, any 7 into 4, any 3 into 1 (all sets of buckets were
    tried: none is the only place for more keys than it has slots). So nothing is refused but for the count.
    `known` is what the filter should hold: for each key the epoch of its last access, its frequency then, its depth.
    """

    known: dict[int, tuple[int, int, int]]

    @initialize(
        max_entries=st.sampled_from([1, 3, 7, 50]),
        half_life_epochs=st.none() | st.integers(1, 4),
        max_age_epochs=st.integers(1, 6),
        max_frequency=st.integers(1, 5),
        initial_entries=st.integers(1, 50),
    )
    def start(
        self,
        max_entries: int,
        half_life_epochs: int | None,
        max_age_epochs: int,
        max_frequency: int,
        initial_entries: int,
    ) -> None:
        self.hotness = HotnessFilter(
            max_entries,
            fingerprint_bits=32,
            max_age_epochs=max_age_epochs,
            max_frequency=max_frequency,
            frequency_half_life_epochs=half_life_epochs,
            initial_entries=initial_entries,
        )
        self.max_age_epochs, self.max_frequency, self.half_life_epochs = max_age_epochs, max_frequency, half_life_epochs
        self.known = {}
        self.epoch = self.swept_epoch = self.refused = self.forgotten = 0

    def frequency(self, key: int) -> int:
        last_epoch, frequency, _ = self.known.get(key, (0, 0, 0))
        return frequency >> (self.epoch - last_epoch) // self.half_life_epochs if self.half_life_epochs else frequency

    def clock(self, key: int) -> int:
        return max(0, self.max_age_epochs - (self.epoch - self.known[key][0])) if key in self.known else 0

    def sweep(self) -> int:
        cold = [key for key in self.known if self.clock(key) == 0]
        for key in cold:
            del self.known[key]
        self.swept_epoch = self.epoch
        self.forgotten += len(cold)
        return len(cold)

    @rule(numbers=st.lists(st.integers(0, len(UNIVERSE) - 1), max_size=40), first_depth=st.sampled_from([0, 7, 65_530]))
    def touch(self, numbers: list[int], first_depth: int) -> None:
        answer = self.hotness.touch(keys_of(*numbers), first_depth)
        new = [number for number in dict.fromkeys(numbers) if number not in self.known]
        for number in set(numbers) - set(new):
            frequency = min(self.frequency(number) + 1, self.max_frequency)
            self.known[number] = (self.epoch, frequency, self.known[number][2])
        if len(self.known) + len(new) > self.hotness.max_entries and self.swept_epoch < self.epoch:
            self.sweep()
        room = self.hotness.max_entries - len(self.known)
        self.refused += len(new[room:])
        for number in new[:room]:
            self.known[number] = (self.epoch, 1, min(first_depth + numbers.index(number), 65_535))
        assert answer.tolist() == [self.known.get(number, (0, 0, 0))[1] for number in numbers]

    @rule(numbers=st.lists(st.integers(0, len(UNIVERSE) - 1), max_size=10))
    def remove(self, numbers: list[int]) -> None:
        there = self.known.keys() & set(numbers)
        assert self.hotness.remove(keys_of(*numbers)) == len(there)
        for number in there:
            del self.known[number]

    @rule(by=st.integers(0, 4))
    def advance_epoch(self, by: int) -> None:
        self.hotness.advance_epoch(by)
        self.epoch += by

    @rule()
    def forget_cold(self) -> None:
        assert self.hotness.forget_cold() == self.sweep()

    @rule()
    def clear(self) -> None:
        self.hotness.clear()
        self.known.clear()

    @invariant()
    def it_knows_what_it_was_told(self) -> None:
        self.hotness.check_invariants()
        assert len(self.hotness) == len(self.known)
        assert (self.hotness.refused, self.hotness.forgotten) == (self.refused, self.forgotten)
        records = self.hotness.look_up(UNIVERSE)
        numbers = UNIVERSE.tolist()
        assert records.frequency.tolist() == [self.frequency(number) for number in numbers]
        assert records.clock_epochs.tolist() == [self.clock(number) for number in numbers]
        assert records.depth_blocks.tolist() == [self.known.get(number, (0, 0, 0))[2] for number in numbers]


FilterMachine.TestCase.settings = examples(100, steps=30)
test_filter_is_a_dictionary_where_fingerprints_are_long = FilterMachine.TestCase


def test_clock_falls_by_one_in_each_epoch_down_to_zero_and_an_access_sets_it_back() -> None:
    hotness = HotnessFilter(100, max_age_epochs=3)
    clocks = []
    for _ in range(5):
        hotness.touch(keys_of(2))
        if not hotness.epoch:
            hotness.touch(keys_of(1))
        clocks.append(hotness.look_up(keys_of(1, 2, 3)).clock_epochs.tolist())
        hotness.advance_epoch()
    assert clocks == [[3, 3, 0], [2, 3, 0], [1, 3, 0], [0, 3, 0], [0, 3, 0]]


def test_ages_are_right_when_the_stored_epochs_wrap_around() -> None:
    hotness = HotnessFilter(100, max_age_epochs=10, frequency_half_life_epochs=4)
    hotness.advance_epoch(2**32 - 3)
    assert [hotness.touch(keys_of(1))[0] for _ in range(4)] == [1, 2, 3, 4]
    hotness.advance_epoch(7)
    records = hotness.look_up(keys_of(1))
    assert (records.clock_epochs[0], records.frequency[0]) == (3, 2)
    assert hotness.forget_cold() == 0
    hotness.advance_epoch(3)
    assert hotness.forget_cold() == 1


@pytest.mark.parametrize("limit", [7, 255])
def test_frequency_stops_at_its_limit(limit: int) -> None:
    hotness = HotnessFilter(100, max_frequency=limit)
    assert [hotness.touch(keys_of(1, 2))[0] for _ in range(limit + 50)] == [*range(1, limit + 1), *[limit] * 50]
    hotness.check_invariants()


def test_depth_stops_at_its_limit_and_stays_that_of_the_first_access() -> None:
    hotness = HotnessFilter(100)
    hotness.touch(keys_of(1, 2, 3), first_depth=65_534)
    hotness.touch(keys_of(1, 2, 3), first_depth=1)
    assert hotness.look_up(keys_of(1, 2, 3)).depth_blocks.tolist() == [65_534, 65_535, 65_535]


def test_frequency_halves_while_there_is_no_access_and_an_access_counts_from_there() -> None:
    hotness = HotnessFilter(100, frequency_half_life_epochs=10)
    for _ in range(40):
        hotness.touch(keys_of(1))
    seen = {}
    for epoch in (0, 9, 10, 19, 20, 30):
        hotness.advance_epoch(epoch - hotness.epoch)
        seen[epoch] = frequencies(hotness, 1)[0]
    assert seen == {0: 40, 9: 40, 10: 20, 19: 20, 20: 10, 30: 5}
    assert hotness.touch(keys_of(1)).tolist() == [6]
    for _ in range(300):
        hotness.touch(keys_of(1))
    hotness.advance_epoch(10_000_000)
    assert frequencies(hotness, 1) == [0]
    assert len(hotness) == 1, "it has decayed to nothing, but is forgotten by its clock only"
    assert hotness.touch(keys_of(1)).tolist() == [1]


def test_a_key_that_is_named_twice_in_one_touch_counts_once() -> None:
    hotness = HotnessFilter(100)
    assert hotness.touch(keys_of(5, 6, 5)).tolist() == [1, 1, 1]
    assert hotness.touch(keys_of(5, 6, 5)).tolist() == [2, 2, 2]
    assert len(hotness) == 2
    assert hotness.look_up(keys_of(5, 6)).depth_blocks.tolist() == [0, 1]


def test_no_keys_are_a_valid_question() -> None:
    hotness = HotnessFilter(100)
    assert hotness.touch(keys_of()).tolist() == hotness.look_up(keys_of()).frequency.tolist() == []
    assert hotness.remove(keys_of()) == hotness.forget_cold() == 0


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


def test_a_full_filter_looks_for_cold_entries_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    hotness = HotnessFilter(4, fingerprint_bits=32)
    sweeps = []
    forget_cold = hotness.forget_cold

    def noted() -> int:
        sweeps.append(hotness.epoch)
        return forget_cold()

    monkeypatch.setattr(hotness, "forget_cold", noted)
    for _ in range(3):
        for number in range(0, 100, 10):
            hotness.touch(key_range(number, 10))
        hotness.advance_epoch()
    assert sweeps == [1, 2], "in the first epoch nothing can be cold"


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters may fill up: 240 entries get 256 slots."""
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
    monkeypatch.setattr(HotnessFilter, "_undo", lambda self, path, moving: None)
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
    fingerprints, addresses = HotnessFilter(100, fingerprint_bits=bits)._hash(key_range(0, 10_000))
    others = other_addresses(fingerprints, addresses)
    assert (other_addresses(fingerprints, others) == addresses).all()
    assert ((addresses ^ others) & 1).all(), "they differ in every size of the filter"
    assert fingerprints.min() >= 1
    assert fingerprints.max() < 2**bits


def test_consecutive_keys_spread_over_all_buckets() -> None:
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


def test_the_same_calls_and_seed_give_the_same_content_slot_by_slot() -> None:
    first, second, other = random_life(1), random_life(1), random_life(2)
    assert all((one == two).all() for one, two in zip(first._columns, second._columns, strict=True))
    assert any((one != two).any() for one, two in zip(first._columns, other._columns, strict=True)), "nothing moved"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_entries": 0}, "max_entries must be 1 to 1073741824, not 0"),
        ({"fingerprint_bits": 3}, "fingerprint_bits must be 4 to 32, not 3"),
        ({"fingerprint_bits": 33}, "fingerprint_bits must be 4 to 32, not 33"),
        ({"max_age_epochs": 0}, "max_age_epochs must be 1 to 1073741824, not 0"),
        ({"max_frequency": 256}, "max_frequency must be 1 to 255, not 256"),
        ({"frequency_half_life_epochs": 0}, "frequency_half_life_epochs must be 1 to 1073741824, not 0"),
        ({"initial_entries": 0}, "initial_entries must be 1 to 1073741824, not 0"),
        ({"max_relocations": -1}, "max_relocations must be 0 to 1048576, not -1"),
    ],
)
def test_a_parameter_out_of_bounds_is_named_with_its_limits(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HotnessFilter(**{"max_entries": 10} | given)  # type: ignore[arg-type]


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="by must be at least 0, not -1"):
        HotnessFilter(10).advance_epoch(-1)


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
    slot = np.flatnonzero(hotness._columns.fingerprint)[0]
    assert slot < 4, "address 1 is not that of bucket 0"
    getattr(hotness._columns, column)[slot] = value
    with pytest.raises(AssertionError, match=message):
        hotness.check_invariants()


def test_two_entries_that_cannot_be_told_apart_are_noticed() -> None:
    hotness = HotnessFilter(1000, initial_entries=1000)
    hotness.touch(keys_of(1))
    slot = int(np.flatnonzero(hotness._columns.fingerprint)[0])
    for column in hotness._columns:
        column[slot + 1] = column[slot]
    hotness._entries += 1
    with pytest.raises(AssertionError, match="cannot be told apart"):
        hotness.check_invariants()


def test_the_blocks_of_a_long_prompt_are_touched_and_looked_up_all_at_once() -> None:
    """As many lines run for three hundred blocks as for thirty: there is no loop over the keys."""

    def work(blocks: int) -> tuple[int, int, int]:
        hotness = HotnessFilter(10_000, initial_entries=10_000, frequency_half_life_epochs=100)
        touch_prompts(hotness, key_range(10**6, 3000))
        known = key_range(0, blocks)
        new = lines_run(lambda: hotness.touch(known))
        return new, lines_run(lambda: hotness.touch(known)), lines_run(lambda: hotness.look_up(known))

    few, many = work(30), work(300)
    assert all(more < 1.5 * less for less, more in zip(few, many, strict=True)), (few, many)
