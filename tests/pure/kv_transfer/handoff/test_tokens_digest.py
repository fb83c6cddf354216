"""Blocks are pulled for the tokens that they were computed from, and for no others."""

from random import Random
from typing import Any

import pytest

from kv_transfer.handoff.tokens_digest import is_of, stamp

TOKENS = [5, 6, 7, 250_000, 0, 1]


def test_blocks_are_of_what_they_were_computed_from_and_of_nothing_longer() -> None:
    stamped = stamp(TOKENS, "tenant")
    assert is_of(stamped, TOKENS, "tenant")
    assert not is_of(stamped, [*TOKENS, 9], "tenant"), "nobody has computed the last one"
    assert is_of(stamp(TOKENS, ""), TOKENS, "")


def test_no_other_prompt_has_the_same_digest() -> None:
    rng = Random(4)
    stamped = stamp(TOKENS, "")
    for place in range(len(TOKENS)):
        changed = list(TOKENS)
        changed[place] ^= 1 << rng.randrange(17)
        assert not is_of(stamped, changed, "")
    assert not is_of(stamped, TOKENS[::-1], "")
    assert not is_of(stamped, TOKENS[:-1], ""), "more was computed than is asked for"
    assert not is_of(stamped, TOKENS, "tenant")


@pytest.mark.parametrize("stamped", [None, [], [6], ["6", "x"], [0, stamp([], "")[1]], [6, 7], {"a": 1}, "6"])
def test_what_nobody_has_stamped_is_of_none(stamped: Any) -> None:
    assert not is_of(stamped, TOKENS, "")
