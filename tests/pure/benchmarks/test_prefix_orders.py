"""The two orders against brute force over the prompts themselves."""

from array import array
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cht import prefix_orders
from benchmarks.cht.prefix_orders import PrefixTree, depth_first_by_weight, longest_prefix_match
from tests.planting import planted

Prompt = tuple[int, ...]
PROMPTS = st.lists(st.lists(st.integers(1, 3), max_size=8).map(tuple), max_size=12)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def by_longest_match(cached: Sequence[Prompt], waiting: Sequence[Prompt]) -> list[int]:
    longest = [max((shared(prompt, each) for each in cached), default=0) for prompt in waiting]
    return sorted(range(len(waiting)), key=lambda each: (-longest[each], each))


def by_branch(prompts: Sequence[Prompt], positions: list[int], waits: Sequence[bool], depth: int = 0) -> list[int]:
    """Symbol by symbol: the branches, heaviest first, then those who end here. positions: in order of insertion."""
    branches: dict[int, list[int]] = {}
    for each in positions:
        if len(prompts[each]) > depth:
            branches.setdefault(prompts[each][depth], []).append(each)
    order = []
    for branch in sorted(branches.values(), key=lambda branch: -sum(waits[each] for each in branch)):
        order += by_branch(prompts, branch, waits, depth + 1)
    return order + [each for each in positions if len(prompts[each]) == depth and waits[each]]


def tree_of(prompts: Sequence[Sequence[int]]) -> PrefixTree:
    tree = PrefixTree()
    for prompt in prompts:
        tree.insert(prompt)
    return tree


@given(PROMPTS, PROMPTS)
def test_longest_prefix_match_is_the_sort_by_what_is_cached(cached: list[Prompt], waiting: list[Prompt]) -> None:
    assert longest_prefix_match(tree_of(cached), waiting) == by_longest_match(cached, waiting)


@given(PROMPTS, PROMPTS)
def test_depth_first_by_weight_visits_the_branch_in_which_most_wait(batch: list[Prompt], waiting: list[Prompt]) -> None:
    tree = tree_of(batch)
    nodes = [tree.insert(prompt) for prompt in waiting]
    prompts, waits = [*batch, *waiting], [False] * len(batch) + [True] * len(waiting)
    expected = by_branch(prompts, list(range(len(prompts))), waits)
    assert [each + len(batch) for each in depth_first_by_weight(tree, nodes)] == expected


@given(PROMPTS, PROMPTS)
def test_tokens_in_arrays_match_as_tuples_do(cached: list[Prompt], waiting: list[Prompt]) -> None:
    as_arrays = [array("I", prompt) for prompt in waiting]
    found = longest_prefix_match(tree_of([array("I", prompt) for prompt in cached]), as_arrays)
    assert found == by_longest_match(cached, waiting)


def test_a_branch_with_many_light_prompts_comes_before_a_deep_one() -> None:
    waiting = [(1, 1, 1, 1), (2, 1), (2, 2)]
    tree = PrefixTree()
    nodes = [tree.insert(prompt) for prompt in waiting]
    assert depth_first_by_weight(tree, nodes) == [1, 2, 0]
    assert longest_prefix_match(tree_of([(1, 1)]), waiting) == [0, 1, 2]


def test_an_edge_that_is_split_at_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cached, waiting = [(1, 2, 3, 3), (1, 2, 1, 1)], [(1, 2, 2), (1, 2, 3)]
    assert longest_prefix_match(tree_of(cached), waiting) == [1, 0] == by_longest_match(cached, waiting)
    planted(monkeypatch, prefix_orders, "_common", lambda one, other: min(len(one), len(other)))
    assert longest_prefix_match(tree_of(cached), waiting) != [1, 0]
