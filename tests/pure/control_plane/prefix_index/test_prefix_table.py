"""The parts of the prefix index: keys of chunks, sets of holders, and the table that never outgrows its bound."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from control_plane.prefix_index.holder_sets import HolderSets, Plane, slots_in
from control_plane.prefix_index.table import NOWHERE, PrefixTable
from kv_transfer.claims.prefix_chunks import chunk_keys, next_key, root_key
from tests.pure.control_plane.prefix_index.small_index import keys


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
