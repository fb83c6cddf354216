"""Which rows change places, so that requests that share a prefix lie side by side."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.batch_order import Key, shared_keys, swaps_to_group

KEYS = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=24)


def table(*rows: list[int]) -> tuple[np.ndarray, list[int]]:
    wide = max((len(row) for row in rows), default=0) + 2
    # What lies behind a row's blocks is rubbish.
    return np.array([[*row, *[7] * (wide - len(row))] for row in rows], dtype=np.int32), [len(row) for row in rows]


def test_a_key_is_the_prefix_that_another_row_has_too() -> None:
    keys = shared_keys(*table([1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 2, 5, 6], [10, 11], [10], [12, 13]))
    assert keys == [(1, 2, 4), (1, 2, 4), (1, 2), (10,), (10,), ()]


@pytest.mark.parametrize("rows", [[], [[1, 2, 3]], [[], []], [[], [1]]])
def test_who_shares_nothing_has_no_key(rows: list[list[int]]) -> None:
    assert shared_keys(*table(*rows)) == [()] * len(rows)


@given(KEYS)
def test_equal_keys_lie_together(keys: list[Key]) -> None:
    held = list(keys)
    outside = sum(one != other for one, other in zip(keys, sorted(keys), strict=True))
    swaps = list(swaps_to_group(keys))
    for one, other in swaps:
        held[one], held[other] = held[other], held[one]
    assert held == sorted(keys)
    assert len([key for key, _ in groupby(held)]) == len(set(keys))
    assert len(swaps) <= max(0, outside - 1)


def test_one_more_row_moves_one_row_of_each_prefix_at_most() -> None:
    keys: list[Key] = [(group,) for group in range(5) for _ in range(12)]
    assert len(list(swaps_to_group([*keys, (0,)]))) == 4
    assert list(swaps_to_group([*keys, (4,)])) == []
