"""The hotness filter by what it counts: clocks, frequencies and depths, their limits, and how much work they are."""

import pytest

from kv_transfer.tiers.hotness_filter import HotnessFilter
from tests.counting import lines_run
from tests.pure.kv_transfer.tiers.filter_keys import frequencies, key_range, keys_of, touch_prompts


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
