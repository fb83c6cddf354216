"""The chunked hash tree against the published algorithm, and the hashes that it is fed with."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.cht.published_hash_tree import PublishedHashTree
from decode_worker import chunk_hashes, chunked_hash_tree
from decode_worker.chunk_trie import ChunkTrie
from decode_worker.chunked_hash_tree import Candidate, ChunkedHashTree, PrefixShare
from tests.counting import lines_run
from tests.examples import examples
from tests.planting import planted
from tests.state_machines import expect_noticed

PROMPTS = st.lists(st.integers(1, 3), max_size=9).map(tuple)


def hashes_of(prompt: tuple[int, ...]) -> list[int]:
    hashes, value = [], 0
    for symbol in prompt:
        value = 4 * value + symbol
        hashes.append(value)
    return hashes


class HashTreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = ChunkedHashTree()
        self.published = PublishedHashTree()
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.waiting: list[str] = []
        self.active: list[str] = []
        self.inserted = 0

    def both(self, what: Callable[[Any], None]) -> None:
        what(self.tree)
        what(self.published)

    def pick(self, names: list[str], data: st.DataObject) -> str:
        name = data.draw(st.sampled_from(names))
        names.remove(name)
        return name

    @rule(prompt=PROMPTS, priority=st.sampled_from((0, 0, 0, 1)))
    def insert(self, prompt: tuple[int, ...], priority: int) -> None:
        name = f"r{self.inserted}"
        self.inserted += 1
        self.prompts[name] = prompt
        self.both(lambda tree: tree.insert(name, hashes_of(prompt), priority))
        self.waiting.append(name)

    @precondition(lambda self: self.waiting)
    @rule()
    def add_the_best(self) -> None:
        best = self.tree.find_best()
        assert best is not None
        self.both(lambda tree: tree.add_to_batch(best.request_id))
        self.waiting.remove(best.request_id)
        self.active.append(best.request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def add_another(self, data: st.DataObject) -> None:
        name = self.pick(self.waiting, data)
        self.both(lambda tree: tree.add_to_batch(name))
        self.active.append(name)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.pick(self.active, data)
        self.both(lambda tree: tree.finish(name))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = self.pick(self.active, data)
        self.both(lambda tree: tree.preempt(name))
        self.waiting.append(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self.pick(self.waiting, data)
        self.both(lambda tree: tree.remove(name))

    @invariant()
    def is_the_published_one(self) -> None:
        self.tree.check_invariants()
        assert self.tree.find_best() == self.published.find_best()
        assert self.tree.tip_chunks == self.published.tip_chunks
        assert self.tree.working_set_chunks == self.published.working_set_chunks
        for name in self.waiting:
            assert self.tree.candidate(name).missing_chunks == self.published.missing_chunks(name)
            assert self.tree.shared_chunks(name) == len(self.prompts[name]) - self.published.missing_chunks(name)
            assert self.tree.potential(name) == self.potential(name)

    @invariant()
    def shares_cover_the_batch(self) -> None:
        shares = list(self.tree.shares())
        assert sum(share.active for share in shares) == len(self.active)
        lengths = [len(share.prefix) for share in shares]
        assert lengths == sorted(lengths, reverse=True)
        for share in shares:
            having = [
                name for name in self.active if hashes_of(self.prompts[name])[: len(share.prefix)] == share.prefix
            ]
            assert len(having) >= share.active

    @invariant()
    def prefixes_are_counted(self) -> None:
        for prompt in self.prompts.values():
            for depth in range(len(prompt) + 1):
                sharing = sum(self.prompts[name][:depth] == prompt[:depth] for name in self.waiting)
                assert self.tree.waiting_with(hashes_of(prompt[:depth])) == sharing

    def potential(self, name: str) -> tuple[int, int]:
        prompt = self.prompts[name]
        sharing = [
            (depth, sum(self.prompts[other][:depth] == prompt[:depth] for other in self.waiting if other != name))
            for depth in range(1, len(prompt) + 1)
        ]
        return max(((depth * peers, depth) for depth, peers in sharing if peers), default=(0, 0))


TestHashTree = HashTreeMachine.TestCase
TestHashTree.settings = examples(300, few=6)


def test_a_preempted_request_that_does_not_come_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ChunkedHashTree, "preempt", ChunkedHashTree.finish)
    expect_noticed(HashTreeMachine)


def test_a_frontier_that_is_not_told_of_new_requests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, chunked_hash_tree, "_at", lambda entry, node: (*entry[:1], 99, *entry[2:], node))
    expect_noticed(HashTreeMachine)


def test_a_join_that_forgets_the_upper_chunks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ChunkTrie, "_join", lambda self, node: None)
    expect_noticed(HashTreeMachine)


def test_the_example_of_the_paper() -> None:
    """FEATHER Figure A.2: with the same tip, the one that shares with part of the batch is better."""
    tree = ChunkedHashTree()
    tree.insert("R1", [b"root", b"a"])
    tree.insert("R2", [b"root", b"b"])
    tree.insert("R4", [b"root", b"c"])
    tree.insert("R3", [b"root", b"b"])
    tree.add_to_batch("R1")
    tree.add_to_batch("R2")
    assert tree.find_best() == Candidate("R3", missing_chunks=0, tip_before=1, tip_after=1, peers=1)
    tree.add_to_batch("R3")
    tree.finish("R1")
    assert (tree.tip_chunks, tree.tip_hash) == (2, b"b")


def test_prompts_shorter_than_a_chunk_share_nothing() -> None:
    tree = ChunkedHashTree()
    tree.insert("short", [])
    tree.insert("long", [1, 2])
    tree.add_to_batch("long")
    assert tree.find_best() == Candidate("short", missing_chunks=0, tip_before=2, tip_after=0, peers=0)
    tree.add_to_batch("short")
    assert (tree.tip_chunks, tree.tip_hash) == (0, None)
    assert list(tree.shares()) == [PrefixShare([1, 2], 1), PrefixShare([], 1)]


def test_ids_are_checked() -> None:
    tree = ChunkedHashTree()
    tree.insert("a", [1])
    with pytest.raises(ValueError, match="request a is in the tree already"):
        tree.insert("a", [2])
    with pytest.raises(KeyError):
        tree.finish("a")
    with pytest.raises(KeyError):
        tree.finish("b")
    tree.add_to_batch("a")
    with pytest.raises(KeyError, match="a is active"):
        tree.remove("a")
    assert tree.discard("a")
    assert not tree.discard("a")
    tree.check_invariants()


def test_what_is_gone_leaves_nothing_behind() -> None:
    """A short request waits at the top for ever; thousands of longer ones come and go below it."""
    tree, rng = ChunkedHashTree(), random.Random(5)
    tree.insert("patient", [], priority=0)
    for index in range(5000):
        name = f"r{index}"
        tree.insert(name, [7, 8, rng.randrange(3)])
        if rng.random() < 0.5:
            tree.add_to_batch(name)
        tree.discard(name)
    tree.check_invariants()
    # A leak of state of requests that have ended is visible nowhere else.
    assert len(tree._root.heap) < 200
    assert len(tree._frontier) < 200
    assert not tree._root.children


@given(st.lists(st.integers(0, 2**31 - 1), max_size=80), st.integers(1, 20), st.integers(0, 80))
def test_equal_hashes_are_equal_prefixes(tokens: list[int], chunk_tokens: int, changed: int) -> None:
    hashes = chunk_hashes.of_tokens(tokens, chunk_tokens)
    assert len(hashes) == len(tokens) // chunk_tokens
    other = [token ^ (index == changed) for index, token in enumerate(tokens)]
    same = [one == two for one, two in zip(hashes, chunk_hashes.of_tokens(other, chunk_tokens), strict=True)]
    assert same == [(index + 1) * chunk_tokens <= changed or changed >= len(tokens) for index in range(len(hashes))]


def test_every_so_many_of_vllms_hashes() -> None:
    hashes = [bytes([index]) for index in range(7)]
    assert chunk_hashes.of_blocks(hashes, 1) == hashes
    assert chunk_hashes.of_blocks(hashes, 3) == [b"\x02", b"\x05"]
    assert chunk_hashes.of_blocks(hashes, 8) == []


def test_a_hundred_thousand_tokens() -> None:
    tokens = list(range(100_000))
    tree = ChunkedHashTree()
    tree.insert("one", chunk_hashes.of_tokens(tokens, 50))
    tree.insert("other", chunk_hashes.of_tokens([*tokens[:77_777], 0, *tokens[77_778:]], 50))
    tree.add_to_batch("one")
    assert tree.candidate("other") == Candidate("other", 2000 - 1555, 2000, 1555, 0)


def test_work_does_not_depend_on_how_many_wait() -> None:
    """One of 5 groups of 100 chunks is inserted, found, added and finished."""

    def work(waiting: int) -> int:
        tree = ChunkedHashTree()
        groups = [[(group, chunk) for chunk in range(99)] for group in range(5)]
        for index in range(waiting):
            tree.insert(f"w{index}", [*groups[index % 5], index])  # type: ignore[list-item]

        def one_of_each_comes_and_goes() -> None:
            for number in range(5):
                tree.insert(f"x{number}", [*groups[number], f"x{number}"])  # type: ignore[list-item]
                tree.find_best()
                tree.add_to_batch(f"x{number}")
                tree.find_best()
                tree.finish(f"x{number}")

        return lines_run(one_of_each_comes_and_goes)

    assert work(3000) < 1.5 * work(100)
