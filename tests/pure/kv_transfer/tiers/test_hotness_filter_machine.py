"""The hotness filter against a plain dictionary, where fingerprints are long enough to be told apart."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.tiers.hotness_filter import HotnessFilter
from tests.examples import examples
from tests.pure.kv_transfer.tiers.filter_keys import keys_of

UNIVERSE = np.arange(60, dtype=np.uint64)


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
