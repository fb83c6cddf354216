"""What each policy is for: who leaves first after which accesses, whatever the constants of the scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.tiers.eviction_policies import (
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    PublishedFormula,
    TwoQueues,
)
from kv_transfer.tiers.hotness import Formula, HotnessTracker
from kv_transfer.tiers.hotness_filter import HotnessFilter
from kv_transfer.tiers.settings import POLICIES, TierSettings

ACCESSES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=40)
STOCK = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "fifo": FirstInFirstOut}


def order(policy: EvictionPolicy, blocks: list[int]) -> list[int]:
    """The blocks in the order in which they have to leave now, each as a run of its own."""
    turns = {group: turn for turn, group in enumerate(policy.groups())}
    return sorted(blocks, key=lambda block: (turns[policy.group(block)], policy.priority(block, 1)))


def make(name: str, capacity_blocks: int = 8) -> tuple[EvictionPolicy, HotnessTracker]:
    settings = TierSettings(max_age_epochs=255, requests_per_epoch=10)
    hotness_filter = HotnessFilter(1000, max_age_epochs=settings.max_age_epochs)
    tracker = HotnessTracker(hotness_filter, settings.requests_per_epoch)
    return POLICIES[name](settings, tracker, capacity_blocks), tracker


def ask(policy: EvictionPolicy, tracker: HotnessTracker, hashes: list[int], times: int = 1) -> None:
    """Requests for these blocks, one after the other."""
    for _ in range(times):
        tracker.accessed(hashes)
        policy.accessed(hashes)


@given(ACCESSES)
def test_lru_is_the_order_of_the_last_accesses(accesses: list[list[int]]) -> None:
    policy = LeastRecentlyUsed()
    last = dict.fromkeys(range(10), -1)
    for now, hashes in enumerate(accesses):
        policy.accessed(hashes)
        last.update(dict.fromkeys(hashes, now))
    assert order(policy, list(range(10))) == sorted(range(10), key=lambda block: last[block])


@given(ACCESSES)
def test_lfu_is_the_order_of_accesses_and_the_last_one_breaks_ties(accesses: list[list[int]]) -> None:
    policy = LeastFrequentlyUsed()
    known = dict.fromkeys(range(10), (0, -1))
    for now, hashes in enumerate(accesses):
        policy.accessed(hashes)
        known.update({block: (known[block][0] + 1, now) for block in hashes})
    assert order(policy, list(range(10))) == sorted(range(10), key=lambda block: known[block])


@given(ACCESSES)
def test_fifo_is_the_order_of_arrival_whatever_hits(accesses: list[list[int]]) -> None:
    policy = FirstInFirstOut()
    first: dict[int, int] = {}
    for now, hashes in enumerate(accesses):
        policy.accessed(hashes)
        for block in hashes:
            first.setdefault(block, now)
    assert order(policy, list(range(10))) == sorted(range(10), key=lambda block: first.get(block, -1))


@pytest.mark.parametrize("name", STOCK)
def test_what_left_begins_anew_when_it_comes_back(name: str) -> None:
    policy = STOCK[name]()
    for hashes in ([1], [1], [1], [2], [2]):
        policy.accessed(hashes)
    policy.forget([1])
    policy.accessed([3])
    policy.accessed([3])
    policy.accessed([1])
    assert order(policy, [1, 2, 3]) == ([1, 2, 3] if name == "lfu" else [2, 3, 1])


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_forgets_what_it_is_told_to_forget(name: str) -> None:
    policy, tracker = make(name)
    for start in range(0, 4_000, 100):
        hashes = list(range(start, start + 100))
        ask(policy, tracker, hashes, times=2)
        policy.forget(hashes)
        tracker.forget(hashes)
    held = [value for value in vars(policy).values() if isinstance(value, dict)]
    assert sum(map(len, held)) + len(tracker) <= 8
    assert policy.priority(1, 1) == policy.priority(10**6, 1), "nothing is known of a forgotten block"


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_asked_for_more_often_and_later_is_not_colder(name: str) -> None:
    policy, tracker = make(name)
    for hashes in ([1, 2], [1], [1]):
        ask(policy, tracker, hashes)
    assert policy.priority(1, 1) >= policy.priority(2, 1) or policy.groups() == (1, 0)


@pytest.mark.parametrize("name", POLICIES)
@given(prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=40))
def test_priorities_fall_with_the_epoch_only(name: str, prompts: list[tuple[int, int]]) -> None:
    """The eviction order finds out about one that rises, not about one that falls."""
    policy, tracker = make(name)
    # A block's hash covers what lies before it: its depth never changes.
    accesses = [[10 * family + depth for depth in range(length)] for family, length in prompts]
    known: dict[int, float] = {}
    asked_for: set[int] = set()
    epoch = policy.epoch
    for hashes in accesses:
        ask(policy, tracker, hashes)
        asked_for.update(hashes)
        now = {block: policy.priority(block, 1) for block in asked_for}
        if policy.epoch == epoch:
            assert all(now[block] >= known[block] for block in known)
        known, epoch = now, policy.epoch


def test_2q_blocks_asked_for_once_leave_first_while_they_are_many() -> None:
    policy = TwoQueues(8)
    policy.accessed([1])
    policy.forget([1])
    policy.accessed([1])
    for block in (11, 12):
        policy.accessed([block])
    assert order(policy, [1, 11, 12]) == [1, 11, 12], "two of eight are no more than a quarter"
    policy.accessed([13])
    assert order(policy, [1, 11, 12, 13]) == [11, 12, 13, 1]


def test_2q_a_scan_does_not_drive_out_what_came_back() -> None:
    policy = TwoQueues(8)
    policy.accessed([1, 2])
    policy.forget([1, 2])
    policy.accessed([1, 2])
    resident = [1, 2]
    for scanned in range(100, 200):
        policy.accessed([scanned])
        resident.append(scanned)
        if len(resident) > 8:
            leaving = order(policy, resident)[0]
            resident.remove(leaving)
            policy.forget([leaving])
    assert {1, 2} <= set(resident)


def test_2q_asked_for_twice_in_a_row_is_still_asked_for_once() -> None:
    policy = TwoQueues(8)
    for _ in range(3):
        policy.accessed([1])
    assert policy.group(1) == policy.group(1) != policy.group(2)


def test_2q_remembers_as_many_as_half_the_capacity() -> None:
    policy = TwoQueues(8)
    for block in range(6):
        policy.accessed([block])
        policy.forget([block])
    policy.accessed([0, 5])
    once, often = policy.group(0), policy.group(5)
    assert once != often
    assert often == policy.group(99), "what is unknown counts as no newcomer"


def test_published_formula_is_what_the_paper_says() -> None:
    tracker = HotnessTracker(HotnessFilter(100, max_age_epochs=10))
    policy = PublishedFormula(tracker, Formula("frequency + clock / length"))
    for _ in range(3):
        tracker.accessed([1])
    tracker.accessed([2])
    tracker.accessed([3])
    assert policy.priority(1, 4) == 3 + 8 / 4
    assert policy.priority(2, 1) == 1 + 9
    assert policy.priority(3, 2) == 1 + 10 / 2


def test_published_formula_ages_by_epoch_down_to_the_frequency() -> None:
    tracker = HotnessTracker(HotnessFilter(100, max_age_epochs=3), requests_per_epoch=2)
    policy = PublishedFormula(tracker, Formula("frequency + clock / length"))
    tracker.accessed([1])
    seen = []
    for _ in range(10):
        seen.append((policy.epoch, policy.priority(1, 1)))
        tracker.accessed([2])
    assert seen == [(epoch, 1 + max(0, 3 - epoch)) for epoch in (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)]


@given(ACCESSES, st.lists(st.integers(70, 79), max_size=50))
def test_decayed_frequency_keeps_its_order_while_nothing_of_it_is_accessed(
    accesses: list[list[int]], others: list[int]
) -> None:
    policy, tracker = make("rachis")
    for hashes in accesses:
        ask(policy, tracker, hashes)
    before = order(policy, list(range(10)))
    for other in others:
        ask(policy, tracker, [other])
    assert order(policy, list(range(10))) == before


@pytest.mark.parametrize(("gap_requests", "frequency", "lifetimes"), [(20, 64, 6), (100, 4, 2)])
def test_decayed_frequency_halves_in_the_typical_time_between_two_accesses(
    gap_requests: int, frequency: int, lifetimes: int
) -> None:
    policy, tracker = make("rachis")
    hot = 10_000
    for turn in range(1100):
        ask(policy, tracker, [turn % gap_requests])
    ask(policy, tracker, [hot], times=frequency)
    newcomers = 0
    while policy.priority(hot + newcomers, 1) <= policy.priority(hot, 1):
        newcomers += 1
        ask(policy, tracker, [hot + newcomers])
    # That a newcomer is new counts as a third of a lifetime.
    assert lifetimes * gap_requests <= newcomers <= 1.4 * (lifetimes + 0.33) * gap_requests


def test_decayed_frequency_what_comes_with_much_that_is_new_leaves_earlier() -> None:
    policy, tracker = make("rachis")
    ask(policy, tracker, [1], times=2)
    ask(policy, tracker, [2], times=2)
    # Both are forgotten by the cache, not by the filter.
    policy.forget([1, 2])
    ask(policy, tracker, [1, *range(100, 140)])
    ask(policy, tracker, [2])
    assert order(policy, [1, 2, 139]) == [139, 1, 2]


def test_decayed_frequency_promising_is_what_is_as_hot_as_a_first_block_alone() -> None:
    policy, tracker = make("rachis")
    ask(policy, tracker, [1])
    assert not policy.is_promising(1), "its prompt brought something new, itself"
    ask(policy, tracker, [1])
    assert policy.is_promising(1)
    ask(policy, tracker, [1, *range(100, 1000)])
    assert policy.is_promising(1), "it keeps what it had"
    ask(policy, tracker, [2, *range(2000, 2100)], times=2)
    assert policy.is_promising(2)
    assert not policy.is_promising(7), "nobody asked for it"
    ask(policy, tracker, [3])
    ask(policy, tracker, [3, *range(3000, 3100)])
    assert not policy.is_promising(3), "asked for twice, and the second time with a hundred new ones"


def test_decayed_frequency_what_nobody_asked_for_leaves_first() -> None:
    policy, tracker = make("rachis")
    ask(policy, tracker, list(range(100)))
    assert order(policy, [5, 1000])[0] == 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("frequency + clock", 23.0),
        ("frequency * clock", 60.0),
        ("clock / length", 5.0),
        ("frequency + clock / length", 8.0),
        ("clock / length + frequency", 8.0),
        ("frequency * clock / length", 15.0),
        ("clock / length * frequency", 15.0),
        ("clock / length / frequency", 20 / 4 / 3),
        ("frequency + clock * length", 83.0),
        ("frequency + clock + length", 27.0),
        ("frequency * clock + length", 64.0),
        ("  frequency*clock  ", 60.0),
    ],
)
def test_formula_has_the_usual_precedence(text: str, value: float) -> None:
    assert Formula(text)(clock=20, frequency=3, length=4) == value


@pytest.mark.parametrize("text", ["clock / frequency", "clock / length"])
def test_formula_never_divides_by_less_than_one(text: str) -> None:
    assert Formula(text)(clock=7, frequency=0, length=0) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "frequency",
        "frequency - clock",
        "frequency + age",
        "frequency + 1",
        "+ clock",
        "frequency +",
        "frequency clock",
        "(frequency + clock) * length",
        "frequency + clock / length * clock",
        "frequency ** clock",
        "__import__('os') + clock",
    ],
)
def test_formula_that_is_none_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"formula .* is not 'x op y op z' with x, y, z of clock, frequency, length"):
        Formula(text)


def test_tracker_counts_a_prompt_once_and_what_follows_it_with_it() -> None:
    tracker = HotnessTracker(HotnessFilter(100), requests_per_epoch=2)
    tracker.accessed([1, 2])
    tracker.accessed([3], 2)
    assert (tracker.epoch, tracker.requests) == (0, 1)
    tracker.accessed([1])
    assert (tracker.epoch, tracker.requests) == (1, 2)
    assert tracker.hotness(1)[:2] == (2, 1)
    assert tracker.hotness(3)[:2] == (1, 0)


def test_tracker_says_how_long_a_block_has_rested_also_one_that_was_forgotten() -> None:
    tracker = HotnessTracker(HotnessFilter(100), requests_per_epoch=2)
    gaps = []
    for request in range(41):
        tracker.accessed([1] if request % 20 == 0 else [2, 3])
        if request % 20 == 0:
            gaps.append(tracker.hotness(1).gap_requests)
            tracker.forget([1])
    assert gaps[1:] == [21.0, 21.0], "twenty, to half an epoch of two"


def test_tracker_takes_hashes_of_vllm_and_numbers_and_nothing() -> None:
    tracker = HotnessTracker(HotnessFilter(100))
    names = [bytes([number]) * 32 for number in range(3)]
    tracker.accessed(names)
    tracker.accessed(names[:2])
    tracker.accessed([])
    assert [tracker.hotness(name).frequency for name in names] == [2, 2, 1]


def test_tracker_knows_again_from_the_filter_what_it_was_told_to_forget() -> None:
    tracker = HotnessTracker(HotnessFilter(100))
    for _ in range(3):
        tracker.accessed([1])
    tracker.forget([1])
    assert tracker.hotness(1).frequency == 0
    tracker.accessed([1])
    assert tracker.hotness(1).frequency == 4
    tracker.clear()
    tracker.accessed([1])
    assert tracker.hotness(1).frequency == 1


def test_tracker_refuses_no_requests_per_epoch() -> None:
    with pytest.raises(ValueError, match="requests_per_epoch must be at least 1, not 0"):
        HotnessTracker(HotnessFilter(100), 0)
