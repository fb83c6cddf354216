"""The index of prefixes against plain dictionaries, its bounds, and what it says of hotness."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from control_plane.prefix_index.holder_sets import HolderSets, Plane, slots_in
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.table import NOWHERE, PrefixTable
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys, chunk_keys, next_key, root_key
from tests.examples import examples

HALF_LIFE_S = 100.0
WORKERS = ("a", "b", "c")


def keys(*numbers: int) -> Keys:
    """Small numbers as keys that spread over the table."""
    return np.array([number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers], dtype=np.uint64)


def index(entries: int = 10_000, workers: tuple[str, ...] = WORKERS) -> PrefixIndex:
    made = PrefixIndex(entries, HALF_LIFE_S)
    for worker in workers:
        made.join(worker, 1)
    return made


def device(*numbers: int) -> ClaimChange:
    return ClaimChange(device_stored=keys(*numbers))


def matched(found: PrefixIndex, worker: str, prompt: Keys) -> tuple[int, int, int]:
    """Chunks on the device, warm, and held."""
    matches = found.lookup(prompt)
    slot = found.slot(worker, found.generation(worker))
    return int(matches.device[slot]), int(matches.warm[slot]), int(matches.held[slot])


# Names of chunks.


def test_keys_cover_all_that_stands_before_them() -> None:
    prompt = list(range(1000))
    root = root_key("service", "")
    found = chunk_keys(prompt, root, 128)

    assert len(found) == 7
    assert (chunk_keys(np.array(prompt, dtype=np.uint32), root, 128) == found).all()
    assert int(found[1]) == next_key(next_key(root, prompt[:128]), prompt[128:256])
    other = chunk_keys([5, *prompt[1:]], root, 128)
    assert not set(found.tolist()) & set(other.tolist()), "one other token at the beginning changes all keys"


def test_tenants_and_services_have_nothing_in_common() -> None:
    prompt = list(range(256))
    roots = {
        root_key(service, salt, adapter) for service in ("s", "t") for salt in ("", "x", "xy") for adapter in ("", "y")
    }
    assert len(roots) == 12
    names = {int(chunk_keys(prompt, root, 128)[-1]) for root in roots}
    assert len(names) == 12


def test_a_prompt_shorter_than_a_chunk_has_no_keys() -> None:
    assert len(chunk_keys([1, 2, 3], 7, 128)) == 0


# Sets of holders.


@given(st.lists(st.tuples(st.sampled_from(list(Plane)), st.integers(0, 70), st.booleans()), max_size=30))
def test_sets_are_what_was_changed(changes: list[tuple[Plane, int, bool]]) -> None:
    sets = HolderSets()
    set_id = 0
    expected: set[tuple[Plane, int]] = set()
    for plane, slot, present in changes:
        set_id = sets.changed(set_id, plane, slot, present)
        (expected.add if present else expected.discard)((plane, slot))
    assert {(plane, slot) for plane in Plane for slot in slots_in(sets.masks(set_id)[plane])} == expected


def test_equal_sets_are_one_set_whatever_the_way() -> None:
    sets = HolderSets()
    there = sets.changed(sets.changed(0, Plane.DEVICE, 1, True), Plane.HOST, 2, True)
    back = sets.changed(sets.changed(0, Plane.HOST, 2, True), Plane.DEVICE, 1, True)
    assert there == back and len(sets) == 5


# The table.


@given(st.lists(st.integers(1, 2**32), unique=True, max_size=300))
def test_what_was_added_is_found_as_long_as_there_is_room(numbers: list[int]) -> None:
    table = PrefixTable(1000)
    names = keys(*numbers)
    places = table.find_or_add(names, 0.0, 0.0)
    assert len(set(places.tolist())) == len(numbers) == table.entries
    assert (table.keys[places] == names).all() and not table.dropped


def test_a_full_table_drops_what_is_coldest_and_never_grows() -> None:
    table = PrefixTable(64)
    rng = np.random.default_rng(1)
    hot = rng.integers(1, 2**64, 8, dtype=np.uint64)
    table.find_or_add(hot, 100.0, 100.0)
    for _ in range(200):
        table.find_or_add(rng.integers(1, 2**64, 50, dtype=np.uint64), *[float(rng.normal())] * 2)
    assert (table.find(hot) != NOWHERE).all(), "hot entries stay"
    assert table.entries <= table.capacity < 128
    assert table.dropped > 9_000


def test_what_is_colder_than_all_is_not_taken_in() -> None:
    table = PrefixTable(16)
    rng = np.random.default_rng(2)
    table.find_or_add(rng.integers(1, 2**64, 1000, dtype=np.uint64), 5.0, 5.0)
    before = set(table.keys.tolist())
    assert (table.find_or_add(rng.integers(1, 2**64, 20, dtype=np.uint64), 1.0, 4.0) == NOWHERE).all()
    assert set(table.keys.tolist()) == before


# Presence.


def test_a_match_ends_where_the_first_chunk_is_missing() -> None:
    found = index()
    found.apply("a", device(1, 2, 4))
    found.apply("b", ClaimChange(device_stored=keys(1), host_stored=keys(2, 3)))
    found.apply("c", ClaimChange(host_stored=keys(1, 2, 3, 4)))
    found.apply("a", ClaimChange(device_removed=keys(3)))
    prompt = keys(1, 2, 3, 4)

    assert matched(found, "a", prompt) == (2, 2, 2), "the fourth cannot be reached without the third"
    assert matched(found, "b", prompt) == (1, 1, 3)
    assert matched(found, "c", prompt) == (0, 0, 4)


def test_a_chunk_that_had_to_give_way_is_where_the_next_one_is() -> None:
    found = index()
    found.apply("a", device(1, 2, 4))
    assert matched(found, "a", keys(1, 2, 3, 4)) == (4, 4, 4), "nobody has said that the third has left"
    found.apply("b", device(3))
    assert matched(found, "a", keys(1, 2, 3, 4)) == (2, 2, 2), "it is known, and with b alone"


def test_what_was_dropped_and_asked_for_again_is_not_taken_for_gone() -> None:
    """The workers have told nothing of it since."""
    found = index()
    found.accessed(keys(1, 2, 3), 0.0)
    assert matched(found, "a", keys(1, 2, 3)) == (0, 0, 0)
    found.apply("a", device(3))
    assert matched(found, "a", keys(1, 2, 3)) == (3, 3, 3)
    found.apply("a", ClaimChange(device_removed=keys(2)))
    assert matched(found, "a", keys(1, 2, 3)) == (0, 0, 0), (
        "now it is known, and held by nobody; so is what is before it"
    )


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


def test_a_worker_that_leaves_or_comes_back_holds_nothing() -> None:
    found = index()
    for worker in WORKERS:
        found.apply(worker, device(1, 2))
    found.leave("a")
    found.join("b", 2)
    assert found.slot("a", 1) == -1 and found.slot("b", 1) == -1
    assert matched(found, "b", keys(1, 2)) == (0, 0, 0)
    assert matched(found, "c", keys(1, 2)) == (2, 2, 2)
    found.join("d", 1)
    assert matched(found, "d", keys(1, 2)) == (0, 0, 0), "it has the place of another, and none of its claims"
    found.apply("a", device(1))
    found.check_invariants()


def test_a_thousand_workers() -> None:
    names = tuple(f"w{number}" for number in range(1000))
    found = index(workers=names)
    for number, name in enumerate(names):
        found.apply(name, device(*range(1, 2 + number % 7)))
    matches = found.lookup(keys(*range(1, 8)))
    lengths = [int(matches.device[found.slot(name, found.generation(name))]) for name in names]
    assert lengths == [1 + number % 7 for number in range(1000)]


# Predictions.


def test_a_prediction_is_believed_until_it_ends() -> None:
    found = index()
    found.predict("a", keys(1, 2), 10.0)
    assert matched(found, "a", keys(1, 2)) == (0, 2, 2)
    found.expire(9.9)
    assert matched(found, "a", keys(1, 2)) == (0, 2, 2)
    found.expire(10.0)
    assert matched(found, "a", keys(1, 2)) == (0, 0, 0)


def test_a_later_prediction_of_the_same_prefix_outlives_an_earlier_one() -> None:
    found = index()
    found.predict("a", keys(1, 2, 3), 10.0)
    found.predict("a", keys(1, 2), 20.0)
    found.expire(15.0)
    assert matched(found, "a", keys(1, 2, 3)) == (0, 2, 2)
    found.expire(25.0)
    assert matched(found, "a", keys(1, 2, 3)) == (0, 0, 0)


def test_predictions_end_with_their_worker() -> None:
    found = index()
    found.predict("a", keys(1), 10.0)
    found.leave("a")
    found.join("d", 1)
    found.expire(11.0)
    assert matched(found, "d", keys(1)) == (0, 0, 0)
    found.check_invariants()


class IndexMachine(RuleBasedStateMachine):
    """Random claims, starts and ends of workers, predictions; beside it a dictionary for each worker and tier."""

    numbers = st.lists(st.integers(1, 30), unique=True, max_size=12)

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(4096, HALF_LIFE_S)
        self.generations = dict.fromkeys(WORKERS, 0)
        self.held: dict[str, list[set[int]]] = {}
        self.predicted: list[tuple[str, float, list[int]]] = []
        self.now_s = 0.0

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: str) -> None:
        self.generations[worker] += 1
        self.index.join(worker, self.generations[worker])
        self.index.join(worker, self.generations[worker])
        self._forget(worker)
        self.held[worker] = [set(), set()]

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.index.leave(worker)
        self._forget(worker)
        self.held.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), stored=numbers, removed=numbers, on_device=st.booleans())
    def apply(self, worker: str, stored: list[int], removed: list[int], on_device: bool) -> None:
        removed = [number for number in removed if number not in stored]
        pair = (keys(*stored), keys(*removed))
        change = ClaimChange(*pair) if on_device else ClaimChange(host_stored=pair[0], host_removed=pair[1])
        self.index.apply(worker, change)
        if worker in self.held:
            tier = self.held[worker][0 if on_device else 1]
            tier -= set(removed)
            tier |= set(stored)

    @rule(worker=st.sampled_from(WORKERS), on_device=numbers, in_host=numbers)
    def replace(self, worker: str, on_device: list[int], in_host: list[int]) -> None:
        self.index.replace(worker, keys(*on_device), keys(*in_host))
        if worker in self.held:
            self._forget(worker)
            self.held[worker] = [set(on_device), set(in_host)]

    @rule(worker=st.sampled_from(WORKERS), prompt=numbers, for_s=st.floats(0.1, 5))
    def predict(self, worker: str, prompt: list[int], for_s: float) -> None:
        self.index.predict(worker, keys(*prompt), self.now_s + for_s)
        if worker in self.held and prompt:
            self.predicted.append((worker, self.now_s + for_s, prompt))

    @rule(passed_s=st.floats(10, 20))
    def all_predictions_end(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.index.expire(self.now_s)
        self.predicted = []

    @rule()
    def compact(self) -> None:
        self.index._compact()

    @rule(prompt=numbers)
    def accessed(self, prompt: list[int]) -> None:
        self.index.accessed(keys(*prompt), self.now_s)

    @rule(prompt=numbers)
    def lookup(self, prompt: list[int]) -> None:
        """Every chunk is made known first, so that none is taken for one that had to give way."""
        self.index.accessed(keys(*prompt), self.now_s)
        for worker, tiers in self.held.items():
            gone = keys(*(number for number in prompt if number not in tiers[0]))
            self.index.apply(worker, ClaimChange(device_removed=gone))
        for worker, tiers in self.held.items():
            warm = tiers[0] | {each for name, _, sent in self.predicted if name == worker for each in sent}
            expected = tuple(_reach(prompt, among) for among in (tiers[0], warm, warm | tiers[1]))
            assert matched(self.index, worker, keys(*prompt)) == expected

    @invariant()
    def claims_are_what_was_claimed(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_invariants()
        assert self.index.workers == sorted(self.held)
        for worker, tiers in self.held.items():
            found = self.index.claims(worker)
            for tier, expected in zip(found, tiers, strict=True):
                assert set(tier.tolist()) == set(keys(*expected).tolist())

    def _forget(self, worker: str) -> None:
        self.predicted = [each for each in self.predicted if each[0] != worker]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = examples(60, steps=40)


def _reach(prompt: list[int], among: set[int]) -> int:
    return next((place for place, number in enumerate(prompt) if number not in among), len(prompt))


# Hotness.


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


def test_holders_of_ever_other_chunks_do_not_fill_memory() -> None:
    """Sets that nothing refers to any more are forgotten."""
    names = tuple(f"w{number}" for number in range(16))
    found = index(entries=4096, workers=names)
    rng = np.random.default_rng(4)
    for _ in range(1000):
        for name in rng.choice(names, 3, replace=False).tolist():
            chunk = keys(int(rng.integers(1, 200)))
            stored = bool(rng.integers(2))
            found.apply(name, ClaimChange(device_stored=chunk) if stored else ClaimChange(device_removed=chunk))
    state: Any = found
    assert len(state._sets) < 1500
    found.check_invariants()
