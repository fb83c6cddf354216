"""Priorities by which blocks leave a tier: lowest first. One class for each policy; a table names them.

    lru         last access; vLLM's own order
    lfu         accesses since it came in, then last access
    fifo        when it came in
    2q          blocks asked for once leave first in, first out, while they hold more than a quarter; the others by
                last access; as many of the first kind are remembered as half the capacity
                (Johnson and Shasha, VLDB 1994, "full version")
    hotprefix   a formula over clock, frequency and length; published: frequency + clock / length (HotPrefix eq. 5)
    rachis      a decayed score: the frequency halves in each lifetime, and depth counts against a block

A policy is told of every prompt that asks for a prefix, hit or not, and of every block that left all tiers. Where it
knows resident blocks only it keeps dictionaries; what outlasts a block is in the hotness filter.
"""

from collections.abc import Sequence
from math import log2
from typing import Protocol

from kv_transfer.hotness import Formula, HotnessTracker
from kv_transfer.radix_tree import BlockHash

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
    """log2 frequency + last access / lifetime - weight * log2 depth.

    One static number for "the frequency, halved in each lifetime since the last access": between two blocks the
    difference does not change while neither is accessed. `lifetime_epochs`: epochs of the filter in which it halves.
    """

    def __init__(self, tracker: HotnessTracker, lifetime_epochs: float, depth_weight: float) -> None:
        self._tracker = tracker
        self._lifetime_epochs = lifetime_epochs
        self._depth_weight = depth_weight

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        hotness = self._tracker.hotness(block_hash)
        recency = hotness.last_access_epoch / self._lifetime_epochs
        return log2(max(1, hotness.frequency)) + recency - self._depth_weight * log2(hotness.depth_blocks + 1)

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        return
