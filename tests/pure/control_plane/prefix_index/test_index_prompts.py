"""Prompts of late are bounded by their number and by their memory, which a router tells of."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.index_prompts import IndexPrompts
from kv_transfer.claims.prefix_chunks import Keys

MIB = 1 << 20


def prompt(number: int, chunks: int) -> Keys:
    return np.arange(number << 32, (number << 32) + chunks, dtype=np.uint64)


def test_long_prompts_make_room_for_later_ones_by_their_memory() -> None:
    prompts = IndexPrompts(1 << 18)
    for number in range(600):
        prompts.add(prompt(number, 8192))
    use = prompts.memory()
    assert (use.used_bytes, use.limit_bytes, use.limit) == (2 * MIB, 2 * MIB, "index.max_entries")


def test_an_index_tells_of_the_prompts_that_it_was_asked_for() -> None:
    index = PrefixIndex(1024, 600.0)
    index.accessed(prompt(1, 100), 1.0)
    assert index.memory().used_bytes == 800


def test_short_ones_are_bounded_by_their_number() -> None:
    prompts = IndexPrompts(1 << 18)
    for number in range(5000):
        prompts.add(prompt(number, 1))
    assert len(prompts) == 4096
    assert [int(keys[-1]) >> 32 for keys in prompts.all()] == list(range(904, 5000))


def test_one_that_there_is_no_room_for_is_not_kept() -> None:
    prompts = IndexPrompts(1)
    prompts.add(prompt(1, MIB // 8 + 1))
    assert len(prompts) == prompts.memory().used_bytes == 0
    prompts.add(prompt(1, MIB // 8))
    assert len(prompts) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 5000, 60_000, 131_072])), max_size=20))
def test_whatever_is_asked_for_again_bytes_are_those_of_what_is_kept(asked: list[tuple[int, int]]) -> None:
    prompts = IndexPrompts(1)
    for number, chunks in asked:
        # The same end at another depth, as no two prompts have it, is one of them.
        prompts.add(prompt(number, chunks)[::-1])
        prompts.check_invariants()
        assert int(prompts.all()[-1][-1]) == number << 32
