"""The radix tree against plain dictionaries of prefixes, the units of the lesson, and how much work it is."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.prefix_runs import Match, Node
from kv_transfer.tiers.radix_tree import RadixTree
from tests.counting import lines_run
from tests.examples import examples
from tests.planting import planted
from tests.state_machines import expect_noticed

# A block is named by the symbols up to and including its own: equal name, equal prefix.
Prefix = tuple[int, ...]
PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=8).map(tuple)


def hashes_of(prompt: Prefix) -> list[int]:
    numbers, number = [], 0
    for symbol in prompt:
        number = 4 * number + symbol
        numbers.append(number)
    return numbers


def prefixes(prompt: Prefix, first: int, count: int) -> list[Prefix]:
    return [prompt[: index + 1] for index in range(first, first + count)]


class TreeMachine(RuleBasedStateMachine):
    """`device`, `host`: what lies where, by prefix. `strays`: other device blocks; `spares`: those that may step in."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[BlockHash] = []
        self.leaves: set[tuple[Node, Tier]] = set()
        self.tree = RadixTree(lambda node, tier: self.leaves.add((node, tier)), self.note_gone)
        self.device: dict[Prefix, int] = {}
        self.host: dict[Prefix, int] = {}
        self.strays: dict[int, Prefix] = {}
        self.spares: dict[Prefix, list[int]] = {}
        self.next_id = 0

    def note_gone(self, hashes: object) -> None:
        self.gone += list(hashes)  # type: ignore[call-overload]

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def resident(self, prefix: Prefix) -> bool:
        return prefix in self.device or prefix in self.host

    def give_up_what_cannot_be_reached(self) -> list[int]:
        given_up = []
        for prefix in sorted(self.host, key=len):
            if len(prefix) > 1 and not self.resident(prefix[:-1]):
                given_up.append(self.host.pop(prefix))
        return given_up

    @rule(prompt=PROMPTS, first=st.integers(0, 7), count=st.integers(1, 8))
    def insert_on_the_device(self, prompt: Prefix, first: int, count: int) -> None:
        first = min(first, len(prompt) - 1)
        count = min(count, len(prompt) - first)
        blocks = self.new_ids(count)
        reachable = not first or prompt[:first] in self.device
        refused = []
        for prefix, block in zip(prefixes(prompt, first, count), blocks, strict=True):
            if reachable and prefix not in self.device:
                self.device[prefix] = block
            else:
                refused.append(block)
                self.strays[block] = prefix
                self.spares.setdefault(prefix, []).append(block)
        assert self.tree.insert(Tier.DEVICE, hashes_of(prompt), first, blocks) == refused

    @rule(prompt=PROMPTS, first=st.integers(0, 7), count=st.integers(1, 8))
    def insert_in_host_memory(self, prompt: Prefix, first: int, count: int) -> None:
        first = min(first, len(prompt) - 1)
        count = min(count, len(prompt) - first)
        slots = self.new_ids(count)
        reachable = not first or self.resident(prompt[:first])
        refused = []
        for prefix, slot in zip(prefixes(prompt, first, count), slots, strict=True):
            if reachable and prefix not in self.host:
                self.host[prefix] = slot
            else:
                refused.append(slot)
        assert self.tree.insert(Tier.HOST, hashes_of(prompt), first, slots) == refused

    @rule(prompt=PROMPTS)
    def say_again_where_blocks_lie(self, prompt: Prefix) -> None:
        on_device = [self.device[prefix] for prefix in prefixes(prompt, 0, len(prompt)) if prefix in self.device]
        assert self.tree.insert(Tier.DEVICE, hashes_of(prompt), 0, on_device) == []

    @rule(data=st.data())
    def bring_back_a_stray(self, data: st.DataObject) -> None:
        heirs = [
            block
            for block, prefix in self.strays.items()
            if prefix not in self.device and (len(prefix) == 1 or prefix[:-1] in self.device)
        ]
        if not heirs:
            return
        block = data.draw(st.sampled_from(heirs))
        prefix = self.strays[block]
        assert self.tree.insert(Tier.DEVICE, hashes_of(prefix), len(prefix) - 1, [block]) == []
        self.forget_stray(block)
        self.device[prefix] = block

    def forget_stray(self, block: int) -> None:
        prefix = self.strays.pop(block)
        if block in self.spares.get(prefix, ()):
            self.spares[prefix].remove(block)

    @rule(data=st.data(), tails_only=st.booleans())
    def remove_from_the_device(self, data: st.DataObject, tails_only: bool) -> None:
        blocks = {block: prefix for prefix, block in self.device.items()} | self.strays
        if tails_only:
            blocks = {block: prefix for block, prefix in blocks.items() if self.tree.is_tail(Tier.DEVICE, block)}
        if not blocks:
            return
        block = data.draw(st.sampled_from(sorted(blocks)))
        prefix = blocks[block]
        expected: list[int] = []
        if block in self.strays:
            self.forget_stray(block)
        elif self.spares.get(prefix):
            self.device[prefix] = self.spares[prefix].pop()
            del self.strays[self.device[prefix]]
        else:
            for other in [each for each in self.device if each[: len(prefix)] == prefix]:
                lost = self.device.pop(other)
                if other != prefix:
                    self.strays[lost] = other
            expected = self.give_up_what_cannot_be_reached()
        assert sorted(self.tree.remove(Tier.DEVICE, block)) == sorted(expected)

    @rule(data=st.data(), tails_only=st.booleans())
    def remove_from_host_memory(self, data: st.DataObject, tails_only: bool) -> None:
        slots = {
            slot: prefix for prefix, slot in self.host.items() if not tails_only or self.tree.is_tail(Tier.HOST, slot)
        }
        if not slots:
            return
        slot = data.draw(st.sampled_from(sorted(slots)))
        del self.host[slots[slot]]
        assert sorted(self.tree.remove(Tier.HOST, slot)) == sorted(self.give_up_what_cannot_be_reached())

    @rule(tier=st.sampled_from(Tier))
    def clear(self, tier: Tier) -> None:
        expected: list[int] = []
        if tier is Tier.DEVICE:
            self.device, self.strays, self.spares = {}, {}, {}
            expected = self.give_up_what_cannot_be_reached()
        else:
            expected = list(self.host.values())
            self.host = {}
        assert sorted(self.tree.clear(tier)) == sorted(expected)

    @rule(prompt=PROMPTS)
    def match(self, prompt: Prefix) -> None:
        device: list[int] = []
        host: list[int] = []
        for prefix in prefixes(prompt, 0, len(prompt)):
            if prefix in self.device and not host:
                device.append(self.device[prefix])
            elif prefix in self.host:
                host.append(self.host[prefix])
            else:
                break
        assert self.tree.match(hashes_of(prompt)) == Match(device, host)

    @invariant()
    def it_is_the_model(self) -> None:
        self.tree.check_invariants()
        assert dict(self.tree.items(Tier.DEVICE)) == {
            block: hashes_of(prefix)[-1]
            for prefix, block in [*self.device.items(), *((prefix, block) for block, prefix in self.strays.items())]
        }
        assert dict(self.tree.items(Tier.HOST)) == {slot: hashes_of(prefix)[-1] for prefix, slot in self.host.items()}
        assert all(self.tree.is_worthless(block) for block in self.strays)
        known = {hashes_of(prefix)[-1] for prefix in self.device.keys() | self.host.keys()}
        assert len(self.tree) == len(known)
        assert all(each in self.tree for each in known)

    @invariant()
    def tails_are_those_that_nothing_follows_in_their_tier(self) -> None:
        for tier, there in ((Tier.DEVICE, self.device), (Tier.HOST, self.host)):
            # In host memory, what follows behind a block that is on the device only does not count.
            expected = {ident for prefix, ident in there.items() if not any(each[:-1] == prefix for each in there)}
            assert {ident for ident in there.values() if self.tree.is_tail(tier, ident)} == expected

    @invariant()
    def every_leaf_was_announced(self) -> None:
        for tier in Tier:
            assert {node for node in self.tree.runs(tier) if node.is_leaf(tier)} <= {
                node for node, announced in self.leaves if announced is tier
            }

    @invariant()
    def what_is_gone_was_told(self) -> None:
        assert len(self.gone) == len(set(self.gone))
        assert not any(each in self.tree for each in self.gone)
        self.gone.clear()

    @invariant()
    def host_roots_are_where_host_memory_takes_over(self) -> None:
        expected = {
            hashes_of(prefix)[-1]
            for prefix in self.host
            if prefix not in self.device and (len(prefix) == 1 or prefix[:-1] in self.device)
        }
        assert {node.hashes[0] for node in self.tree.host_roots()} == expected


TreeMachine.TestCase.settings = examples(200, steps=40)
test_tree_is_a_dictionary_of_prefixes = TreeMachine.TestCase


def _split_that_leaves_the_children_with_the_head(
    tree: RadixTree, node: Node, index: int, leaving: object = None
) -> Node:
    children = dict(node.children)
    tail = SPLIT(tree, node, index)
    node.children = {**children, tail.hashes[0]: tail}
    tail.children = {}
    return tail


def _common_blocks_that_round_up(run: Node, hashes: Sequence[BlockHash], at: int) -> int:
    length = COMMON_BLOCKS(run, hashes, at)
    return min(length + 1, len(run.hashes), len(hashes) - at)


# The original, for the planted one above.
SPLIT = RadixTree._split
COMMON_BLOCKS = Node.common_blocks


def test_machine_sees_a_split_that_forgets_the_subtree(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, RadixTree, "_split", _split_that_leaves_the_children_with_the_head)
    expect_noticed(TreeMachine)


def test_machine_sees_a_match_that_rounds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, Node, "common_blocks", _common_blocks_that_round_up)
    expect_noticed(TreeMachine)


def test_machine_sees_a_removal_that_keeps_the_host_blocks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, RadixTree, "_drop", lambda tree, node: [])
    expect_noticed(TreeMachine)


def tree_of(*prompts: str) -> RadixTree:
    """Each prompt's blocks on the device; the number of a block is its place among all that were inserted."""
    tree, inserted = RadixTree(), 0
    for prompt in prompts:
        hashes = text_hashes(prompt)
        hit = len(tree.match(hashes).device)
        tree.insert(Tier.DEVICE, hashes, hit, list(range(inserted, inserted + len(hashes) - hit)))
        inserted += len(hashes) - hit
    tree.check_invariants()
    return tree


def text_hashes(prompt: str) -> list[bytes]:
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


def on_device(tree: RadixTree, prompt: str) -> list[int]:
    return tree.match(text_hashes(prompt)).device


def test_empty_tree_and_empty_prompt_match_nothing() -> None:
    assert RadixTree().match(text_hashes("abc")) == Match()
    assert tree_of("abc").match([]) == Match()


def test_a_prompt_matches_itself_and_what_begins_it() -> None:
    tree = tree_of("abcd")
    assert on_device(tree, "abcd") == [0, 1, 2, 3]
    assert on_device(tree, "abcdef") == [0, 1, 2, 3]
    assert on_device(tree, "abc") == [0, 1, 2]


@pytest.mark.parametrize("length", range(1, 9))
def test_a_match_ends_where_the_prompts_part(length: int) -> None:
    tree = tree_of("abcdefgh")
    assert on_device(tree, "abcdefgh"[:length] + "x" * 5) == list(range(length))


def test_a_split_keeps_both_halves_and_what_was_behind() -> None:
    tree = tree_of("abcdef", "abcdefgh", "abcdefij", "abxy", "abcz")
    assert on_device(tree, "abcdefgh") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert on_device(tree, "abcdefij") == [0, 1, 2, 3, 4, 5, 8, 9]
    assert on_device(tree, "abxy") == [0, 1, 10, 11]
    assert on_device(tree, "abczzz") == [0, 1, 2, 12]


def test_equal_blocks_behind_other_ones_are_no_hit() -> None:
    tree = tree_of("abcd")
    assert on_device(tree, "xbcd") == []
    assert on_device(tree, "acd") == [0]


def test_what_was_removed_is_matched_no_more() -> None:
    tree = tree_of("abcd", "abxy")
    for block, left in ((3, [0, 1, 2]), (2, [0, 1])):
        assert tree.is_tail(Tier.DEVICE, block)
        assert tree.remove(Tier.DEVICE, block) == []
        assert on_device(tree, "abcd") == left
        assert tree.node_of(Tier.DEVICE, block) is None
    assert on_device(tree, "abxy") == [0, 1, 4, 5]
    assert tree.nodes == 1, "what nothing sets apart is one run again"


def test_runs_join_when_the_whole_prefix_lies_in_both_tiers() -> None:
    tree = tree_of("abcdef")
    for first in (0, 2, 4):
        tree.insert(Tier.HOST, text_hashes("abcdef"), first, [first, first + 1])
        tree.check_invariants()
    assert tree.nodes == 1


def test_removing_what_the_tree_does_not_know_changes_nothing() -> None:
    tree = tree_of("ab")
    assert tree.remove(Tier.DEVICE, 99) == []
    assert tree.remove(Tier.HOST, 0) == []
    assert on_device(tree, "ab") == [0, 1]


def test_match_and_insert_of_a_long_prompt_are_no_more_work_in_a_large_tree() -> None:
    """They go along the prompt, and do not walk over the tree."""

    def work(prompts: int) -> tuple[int, int]:
        rng, tree = random.Random(1), RadixTree()

        def insert(prompt: list[bytes], first: int) -> None:
            hit = len(tree.match(prompt).device)
            tree.insert(Tier.DEVICE, prompt, hit, range(first, first + len(prompt) - hit))

        # One prefix of a hundred blocks that all share, then a way of its own for each.
        shared = [rng.randbytes(32) for _ in range(100)]
        own = [[*shared, *(rng.randbytes(32) for _ in range(60))] for _ in range(prompts)]
        for number, prompt in enumerate(own):
            insert(prompt, 1000 * number)
        new = [*shared, *own[0][100:130], *(rng.randbytes(32) for _ in range(30))]
        return lines_run(lambda: tree.match(own[0])), lines_run(lambda: insert(new, 10**7))

    small, large = work(8), work(400)
    assert all(more <= 1.2 * less for less, more in zip(small, large, strict=True)), (small, large)
