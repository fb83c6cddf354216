"""The swap ledger against memory that is really copied: what comes back is what was taken, and no slot is lost."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.host_memory.swap_ledger import SwapCopies, SwapLedger
from tests.examples import examples

SLOTS = 12
BLOCK = 4
NAMES = st.sampled_from("abcde")
TOKENS = st.integers(1, 24)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


class LedgerMachine(RuleBasedStateMachine):
    """One engine: between steps sessions are shortened; a step swaps out and resumes, and then copies. Some that are
    resumed are copied back by others, which takes as long as it takes.

    `host` is memory, written as the copies say. `swapped` is what the ledger should know: for each request its tokens,
    and the content of its blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = BlockReferences(SLOTS)
        self.ledger = SwapLedger(self.slots, BLOCK)
        # What others copy back still: slots, and what has to lie in them.
        self.taken: list[tuple[list[int], list[object]]] = []
        self.host: list[object] = [None] * SLOTS
        self.device: dict[int, object] = {}
        self.swapped: dict[str, tuple[int, list[object]]] = {}
        self.out_in_this_step: set[str] = set()
        self.due_back: dict[int, object] = {}
        self.between_steps = True
        self.content = 0
        self.next_block = 0

    def new_blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    @precondition(lambda self: self.between_steps)
    @rule(name=NAMES, tokens=st.integers(0, 24))
    def shorten(self, name: str, tokens: int) -> None:
        had, contents = self.swapped.get(name, (0, []))
        assert self.ledger.shorten(name, tokens) == max(0, had - tokens)
        self.forget(name, tokens, had, contents)

    def forget(self, name: str, tokens: int, had: int, contents: list[object]) -> None:
        if 0 < tokens < had:
            self.swapped[name] = (tokens, contents[: blocks_of(tokens)])
        elif had and not tokens:
            del self.swapped[name]

    @rule(name=NAMES, tokens=TOKENS)
    def swap_out(self, name: str, tokens: int) -> None:
        if name in self.swapped:
            with pytest.raises(AssertionError, match="swapped out already"):
                self.ledger.swap_out(name, [0], 1)
            return
        self.between_steps = False
        blocks = self.new_blocks(blocks_of(tokens))
        for block in blocks:
            self.content += 1
            self.device[block] = self.content
        room = len(blocks) <= self.ledger.free_slots
        # The request may hold more blocks than have tokens in them.
        assert self.ledger.swap_out(name, [*blocks, 999], tokens) is room
        if room:
            self.swapped[name] = (tokens, [self.device[block] for block in blocks])
            self.out_in_this_step.add(name)

    @rule(name=NAMES, first=st.integers(0, 6))
    def swap_back(self, name: str, first: int) -> None:
        if name not in self.swapped or name in self.out_in_this_step:
            return
        self.between_steps = False
        _, contents = self.swapped.pop(name)
        first = min(first, len(contents))
        blocks = self.new_blocks(len(contents) - first)
        self.ledger.swap_back(name, first, blocks)
        self.due_back |= dict(zip(blocks, contents[first:], strict=True))

    @rule(name=NAMES, first=st.integers(0, 6))
    def take_slots(self, name: str, first: int) -> None:
        if name not in self.swapped or name in self.out_in_this_step:
            return
        _, contents = self.swapped.pop(name)
        self.taken.append((self.ledger.take_slots(name, first), contents[first:]))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def copied_back_by_others(self, data: st.DataObject) -> None:
        slots, contents = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        assert [self.host[slot] for slot in slots] == contents
        self.slots.release(slots)

    @rule(name=NAMES)
    def drop_while_resuming(self, name: str) -> None:
        if name not in self.out_in_this_step:
            self.between_steps = False
            self.ledger.drop(name)
            self.swapped.pop(name, None)

    @rule()
    def run_the_step(self) -> None:
        copies = self.ledger.take_copies()
        written = [slot for _, slot in copies.out]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        assert not set(written) & {slot for _, slot in copies.back}, "a slot is used again before it is read"
        for block, slot in copies.out:
            self.host[slot] = self.device.pop(block)
        assert {block: self.host[slot] for block, slot in copies.back} == self.due_back
        assert self.ledger.take_copies() == SwapCopies(), "they are told once"
        self.out_in_this_step, self.due_back, self.between_steps = set(), {}, True

    @invariant()
    def the_books_are_right(self) -> None:
        self.ledger.check_invariants()
        assert {name: self.ledger.tokens(name) for name in "abcde"} == {
            name: self.swapped.get(name, (0, []))[0] for name in "abcde"
        }
        assert self.ledger.used_slots == sum(len(contents) for _, contents in self.swapped.values())
        if self.between_steps:
            taken = sum(len(slots) for slots, _ in self.taken)
            assert self.ledger.free_slots == SLOTS - self.ledger.used_slots - taken


LedgerMachine.TestCase.settings = examples(150, steps=40)
test_ledger_gives_back_what_it_took = LedgerMachine.TestCase


def test_shortening_keeps_the_slots_of_the_first_tokens_and_frees_the_others_at_once() -> None:
    ledger = SwapLedger(BlockReferences(4), BLOCK)
    assert ledger.swap_out("a", [10, 11, 12], 11)
    slots = dict(ledger.take_copies().out)
    assert ledger.shorten("a", 6) == 5
    assert (ledger.tokens("a"), ledger.free_slots) == (6, 2)
    ledger.swap_back("a", 0, [20, 21])
    assert ledger.take_copies().back == ((20, slots[10]), (21, slots[11]))


def test_shortening_to_more_tokens_than_there_are_changes_nothing() -> None:
    ledger = SwapLedger(BlockReferences(4), BLOCK)
    ledger.swap_out("a", [10, 11], 7)
    assert (ledger.shorten("a", 7), ledger.shorten("a", 100), ledger.shorten("nobody", 0)) == (0, 0, 0)
    assert ledger.tokens("a") == 7


def test_blocks_that_are_cached_on_the_device_are_not_copied_back() -> None:
    ledger = SwapLedger(BlockReferences(4), BLOCK)
    ledger.swap_out("a", [10, 11, 12], 12)
    slots = dict(ledger.take_copies().out)
    ledger.swap_back("a", 2, [22])
    assert ledger.take_copies().back == ((22, slots[12]),)
    assert ledger.counters.blocks_out == 3
    assert ledger.counters.blocks_back == 1
    assert ledger.free_slots == 4


def test_slots_of_a_resumed_request_are_free_after_the_step_that_reads_them() -> None:
    ledger = SwapLedger(BlockReferences(2), BLOCK)
    ledger.swap_out("a", [10, 11], 8)
    ledger.take_copies()
    ledger.swap_back("a", 0, [20, 21])
    assert ledger.free_slots == 0
    assert not ledger.swap_out("b", [10], 4)
    ledger.take_copies()
    assert ledger.swap_out("b", [10], 4)


def test_slots_of_a_request_that_others_copy_back_are_theirs_and_those_in_front_are_free() -> None:
    pool = BlockReferences(4)
    ledger = SwapLedger(pool, BLOCK)
    ledger.swap_out("a", [10, 11, 12], 12)
    slots = dict(ledger.take_copies().out)
    assert ledger.take_slots("a", 1) == [slots[11], slots[12]]
    assert (ledger.tokens("a"), ledger.free_slots, ledger.used_slots) == (0, 2, 0)
    assert ledger.take_copies() == SwapCopies()
    assert (ledger.counters.blocks_back, ledger.counters.blocks_back_async) == (2, 2)
    pool.release([slots[11], slots[12]])
    assert ledger.free_slots == 4


@pytest.mark.parametrize(("slots", "blocks", "tokens"), [(0, [1], 4), (2, [1, 2, 3], 9), (4, [], 0)])
def test_without_room_or_without_tokens_nothing_is_done(slots: int, blocks: list[int], tokens: int) -> None:
    ledger = SwapLedger(BlockReferences(slots), BLOCK)
    assert not ledger.swap_out("a", blocks, tokens)
    assert ledger.take_copies() == SwapCopies()
    assert (ledger.tokens("a"), ledger.free_slots) == (0, slots)


def test_a_slot_that_is_owned_and_free_is_noticed() -> None:
    slots = BlockReferences(3)
    ledger = SwapLedger(slots, BLOCK)
    assert ledger.swap_out("a", [10], 4)
    slots.release([slot for _, slot in ledger.take_copies().out])
    with pytest.raises(AssertionError, match="a slot is owned and free"):
        ledger.check_invariants()
