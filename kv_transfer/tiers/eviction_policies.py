"""Priorities by which blocks leave a tier: lowest first. One class for each policy; a table names them.

    lru         last access; vLLM's own order
    lfu         accesses since it came in, then last access
    fifo        when it came in
    2q          blocks asked for once leave first in, first out, while they hold more than a quarter; the others by
                last access; as many of the first kind are remembered as half the capacity
                (Johnson and Shasha, VLDB 1994, "full version")
    hotprefix   a formula over clock, frequency and length; published: frequency + clock / length (HotPrefix eq. 5)
    rachis      a decayed score: the frequency halves in each lifetime, and what was new to the prompt counts against it

A policy sees every prompt that asks for a prefix, hit or not, and every block that left all tiers. Where it knows
resident blocks only it keeps dictionaries; what outlasts a block is in the hotness filter.
"""

from collections.abc import Sequence
from math import log2
from typing import Protocol

from kv_transfer.blocks import BlockHash
from kv_transfer.tiers.hotness import Formula, HotnessTracker
from kv_transfer.tiers.reuse_gaps import ReuseGaps

Priority = float


class EvictionPolicy(Protocol):
    """Blocks of the first group in `groups()` leave before those of the next; within one, lowest priority first."""

    @property
    def epoch(self) -> int:
        """Rises whenever priorities may have fallen without an access."""

    def groups(self) -> Sequence[int]:
        """All groups, in the order in which they have to give up blocks now."""

    def group(self, block_hash: BlockHash) -> int: ...

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        """Of a run of that length which ends with this block."""

    def is_promising(self, block_hash: BlockHash) -> bool:
        """Whether a block that was asked for often enough is worth a copy to host memory."""

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt asked for these blocks."""

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks lie in no tier any more."""


class _OneGroup:
    """What policies with a static priority and one group share."""

    epoch = 0

    def groups(self) -> Sequence[int]:
        return (0,)

    def group(self, block_hash: BlockHash) -> int:
        return 0

    def is_promising(self, block_hash: BlockHash) -> bool:
        return True

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        return


class LeastRecentlyUsed(_OneGroup):
    def __init__(self) -> None:
        self._tick = 0
        self._last: dict[BlockHash, int] = {}

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        self._tick += 1
        self._last.update(dict.fromkeys(hashes, self._tick))

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        return self._last.get(block_hash, 0)

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        for each in hashes:
            self._last.pop(each, None)


class LeastFrequentlyUsed(LeastRecentlyUsed):
    # Last accesses break ties only.
    _MOST_ACCESSES = 2**40

    def __init__(self) -> None:
        super().__init__()
        self._accesses: dict[BlockHash, int] = {}

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        super().accessed(hashes)
        for each in hashes:
            self._accesses[each] = self._accesses.get(each, 0) + 1

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        return self._accesses.get(block_hash, 0) + super().priority(block_hash, length_blocks) / self._MOST_ACCESSES

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        super().forget(hashes)
        for each in hashes:
            self._accesses.pop(each, None)


class FirstInFirstOut(LeastRecentlyUsed):
    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        self._tick += 1
        for each in hashes:
            self._last.setdefault(each, self._tick)


class TwoQueues(LeastRecentlyUsed):
    """`capacity_blocks`: of the tiers together."""

    _ONCE, _OFTEN = 0, 1

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._once_at_most = max(1, capacity_blocks // 4)
        self._remembered_at_most = max(1, capacity_blocks // 2)
        self._once: dict[BlockHash, int] = {}
        self._remembered: dict[BlockHash, None] = {}

    def groups(self) -> Sequence[int]:
        once_first = len(self._once) > self._once_at_most
        return (self._ONCE, self._OFTEN) if once_first else (self._OFTEN, self._ONCE)

    def group(self, block_hash: BlockHash) -> int:
        return self._ONCE if block_hash in self._once else self._OFTEN

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        return self._once.get(block_hash) or super().priority(block_hash, length_blocks)

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        self._tick += 1
        for each in hashes:
            if each in self._last or each in self._remembered:
                self._remembered.pop(each, None)
                self._last[each] = self._tick
            else:
                # Asked for again while it is here, it stays among those asked for once.
                self._once.setdefault(each, self._tick)

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        super().forget(hashes)
        for each in hashes:
            if self._once.pop(each, None) is not None:
                self._remembered[each] = None
        while len(self._remembered) > self._remembered_at_most:
            del self._remembered[next(iter(self._remembered))]


class PublishedFormula(_OneGroup):
    """Over what the filter remembers of a block. Clocks age, so the order is built anew each epoch of the filter."""

    def __init__(self, tracker: HotnessTracker, formula: Formula) -> None:
        self._tracker = tracker
        self._formula = formula

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._tracker.epoch

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        hotness = self._tracker.hotness(block_hash)
        clock = self._tracker.clock(hotness)
        return self._formula(clock=clock, frequency=hotness.frequency, length=length_blocks)

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        return


class DecayedFrequency(_OneGroup):
    """log2 frequency + last access / lifetime - weight * log2 (1 + blocks that were new to the prompt).

    One static number for "the frequency, halved in each lifetime since the last access": between two blocks the
    difference does not change while neither is accessed. A block keeps the highest that it ever had. The lifetime is
    the typical time between two accesses of a block, as it is measured, and time is counted in lifetimes. So a trace in
    which prompts come back within ten requests is not cached by what was hot a thousand requests ago.
    A prompt with much that no prompt asked for before is rarely asked for again, nor is what it shares with others.
    What was not accessed leaves first.
    """

    def __init__(self, tracker: HotnessTracker, lifetime_requests: float, novelty_weight: float) -> None:
        self._tracker = tracker
        self._gaps = ReuseGaps(lifetime_requests)
        self._novelty_weight = novelty_weight
        self._requests = tracker.requests
        self._lifetimes = 0.0
        self._priorities: dict[BlockHash, Priority] = {}

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        return self._priorities.get(block_hash, _NEVER_ACCESSED)

    def is_promising(self, block_hash: BlockHash) -> bool:
        """At least as hot as one that is asked for the first time, in a prompt that brings nothing else."""
        return self.priority(block_hash, 1) >= self._lifetimes

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        passed, self._requests = self._tracker.requests - self._requests, self._tracker.requests
        self._lifetimes += passed / self._gaps.median_requests()
        records = [self._tracker.hotness(each) for each in hashes]
        known = [each.gap_requests for each in records if each.frequency > 1]
        self._gaps.add(known)
        base = self._lifetimes - self._novelty_weight * log2(1 + len(hashes) - len(known))
        priorities = self._priorities
        for each, record in zip(hashes, records, strict=True):
            priorities[each] = max(priorities.get(each, _NEVER_ACCESSED), base + _LOG2[record.frequency])

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        for each in hashes:
            self._priorities.pop(each, None)


# Below all others, and still a number to machines that read it.
_NEVER_ACCESSED = -float(2**30)
# Of frequencies; one that the full filter refused counts as 1.
_LOG2 = [0.0, *map(log2, range(1, 256))]
