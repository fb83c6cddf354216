"""Blocks of leases and loads, against sets: counted once, and found in front of what shares them."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.leased_blocks import LeasedBlocks
from prefill_worker.planning import plan_step
from prefill_worker.policies import Contender
from tests.pure.prefill_worker.test_begun_prompts import BLOCK, contender, names


@dataclass(frozen=True)
class Block:
    block_id: int


PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def blocks_of(prompt: tuple[int, ...]) -> list[Block]:
    """The same in front where prompts begin alike; of their text."""
    return [Block(hash(prompt[: end + 1])) for end in range(len(prompt))]


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), PROMPTS)), PROMPTS)
def test_each_is_counted_once_and_found_in_front(
    steps: list[dict[str, tuple[int, ...]]], prompt: tuple[int, ...]
) -> None:
    leased = LeasedBlocks()
    for step in steps:
        # A name stands for what it holds, as a request's does: of another one it is another.
        holders = {f"{name}{holds}": blocks_of(holds) for name, holds in step.items()}
        leased.look(holders)
        there = {block for blocks in holders.values() for block in blocks}
        assert len(leased) == len(there)
        assert leased.in_front(blocks_of(prompt)) == len(there & set(blocks_of(prompt)))


def test_what_a_load_adds_is_seen() -> None:
    leased = LeasedBlocks()
    leased.look({"load": blocks_of((1,))})
    leased.look({"load": blocks_of((1, 2))})
    assert len(leased) == 2


def granted(asking: Contender, capacity_blocks: int) -> list[str]:
    plan = plan_step([asking], 1000, capacity_blocks, 9, BLOCK)
    return names([grant.contender for grant in plan.grants])


@pytest.mark.parametrize("evictable", [False, True])
def test_a_contender_pays_for_its_own_blocks_alone(evictable: bool) -> None:
    """Six blocks, of which it has four, and three of those are leased."""
    asking = contender("asks", 96, held=4)
    asking.evictable = evictable
    asking.shared_blocks, asking.first_block, asking.leased_blocks = 3, 7, 3
    assert granted(asking, 2) == []
    assert granted(asking, 3) == ["asks"]


def test_what_nobody_can_take_still_pays_for_what_it_is_to_have() -> None:
    """Blocks that it shares with others are none of those."""
    first, second = (contender(name, 96, held=4) for name in ("first", "second"))
    for each in (first, second):
        each.evictable, each.shared_blocks, each.first_block = False, 4, 7
    plan = plan_step([first, second], 1000, 4 + 2 + 1, 9, BLOCK)
    assert names([grant.contender for grant in plan.grants]) == ["first"]
    plan = plan_step([first, second], 1000, 4 + 2 + 2, 9, BLOCK)
    assert names([grant.contender for grant in plan.grants]) == ["first", "second"]
