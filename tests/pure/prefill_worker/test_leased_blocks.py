"""Blocks of leases and loads, against sets: counted once, and found in front of what shares them."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.leased_blocks import LeasedBlocks
from prefill_worker.planning import plan_step
from prefill_worker.policies import Contender
from tests.pure.prefill_worker.test_begun_prompts import BLOCK, B, contender, names


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
        holders = {name: blocks_of(holds) for name, holds in step.items()}
        leased.look(holders)
        there = {block for blocks in holders.values() for block in blocks}
        assert len(leased) == len(there)
        assert leased.in_front(blocks_of(prompt)) == len(there & set(blocks_of(prompt)))


def test_what_a_load_adds_is_seen() -> None:
    leased = LeasedBlocks()
    leased.look({"load": blocks_of((1,))})
    leased.look({"load": blocks_of((1, 2))})
    assert len(leased) == 2


def test_one_that_holds_others_meanwhile_is_read_again() -> None:
    """A load that failed and began anew, while no step was planned."""
    leased = LeasedBlocks()
    leased.look({"load": blocks_of((1, 2))})
    leased.look({"load": blocks_of((1, 0))})
    assert leased.in_front(blocks_of((1, 0))) == 2 and leased.in_front(blocks_of((1, 2))) == 1


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


def test_blocks_that_begin_as_those_that_are_kept_are_there_once() -> None:
    """Six blocks are kept for one that goes first; another one has six as well, four of them the same."""
    first, second = contender("first", 96, held=5), contender("second", 96, held=5, whose=B)
    for each in (first, second):
        each.shared_blocks, each.first_block = 4, 7

    def of_second(capacity_blocks: int) -> bool:
        plan = plan_step([second, first], 1000, capacity_blocks, 1, BLOCK, begun=[first])
        return names([grant.contender for grant in plan.grants]) == ["second"]

    assert [of_second(6 + 1), of_second(6 + 2)] == [False, True]
    second.first_block = 9
    assert not of_second(6 + 2), "nothing is shared"
    second.first_block, second.priority = 7, -1
    assert of_second(6), "nothing is kept from it"
