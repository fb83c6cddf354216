"""Which requests have KV blocks in host memory since they were preempted, and which copies the next step has to make.

Who owns the copies of a swapped request:
    swapped out                 its host slots, pinned here until it is resumed, shortened or dropped
    shortened by an update      the slots of the longest common prefix stay, the others are free at once
    resumed                     the slots are free once the step that copies them back is built
    resumed beside steps        who copies them back in the background, who releases them once that has ended
    dropped, finished, aborted  free at once

Within a step every copy out comes before every copy in: what is copied back was copied out by an earlier step, and a
slot that a copy in gives up is used again by a later step only. No room is an answer, not an error: the caller drops
the blocks then, and they are computed again. Source: Stream2LLM section 4.2, "Cache Invalidation Semantics".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class SlotPool(Protocol):
    """Host slots, of which others may have some: `host_memory.block_references`, or what the tiers leave."""

    @property
    def size(self) -> int: ...

    @property
    def free(self) -> int:
        """Slots that can probably be had."""

    def allocate(self, number: int) -> list[int] | None:
        """That many slots. None: they are not to be had, and the caller gets none."""

    def release(self, slots: Sequence[int]) -> object: ...


@dataclass(frozen=True, slots=True)
class SwapCopies:
    """Copies of one step: (device block, host slot) pairs, all of `out` before any of `back`."""

    out: tuple[tuple[int, int], ...] = ()
    back: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Swapped:
    tokens: int
    slots: list[int]


@dataclass(slots=True)
class SwapCounters:
    """Blocks that were to be copied, since the start, in both directions."""

    blocks_out: int = 0
    blocks_back: int = 0
    # Of these, while steps compute others.
    blocks_back_async: int = 0


@dataclass(slots=True)
class _Pending:
    out: list[tuple[int, int]] = field(default_factory=list)
    back: list[tuple[int, int]] = field(default_factory=list)
    slots_after: list[int] = field(default_factory=list)


class SwapLedger:
    """Bookkeeping of what lies in host slots of one block each. `block_size`: tokens of a block."""

    def __init__(self, pool: SlotPool, block_size: int) -> None:
        self.counters = SwapCounters()
        self._pool = pool
        self._block_size = block_size
        self._swapped: dict[str, _Swapped] = {}
        self._pending = _Pending()

    @property
    def free_slots(self) -> int:
        return self._pool.free

    @property
    def slots(self) -> int:
        """Slots in all."""
        return self._pool.size

    @property
    def used_slots(self) -> int:
        """Slots that hold the blocks of a swapped request."""
        return sum(len(entry.slots) for entry in self._swapped.values())

    def tokens(self, request_id: str) -> int:
        """Tokens of the request whose KV is here; 0 when it is not swapped out."""
        entry = self._swapped.get(request_id)
        return entry.tokens if entry else 0

    def swap_out(self, request_id: str, blocks: Sequence[int], tokens: int) -> bool:
        """Takes the request's first `tokens` tokens, which lie in these device blocks. False: no room, nothing done."""
        if request_id in self._swapped:
            raise AssertionError(f"{request_id} is swapped out already")
        blocks = blocks[: self._blocks_of(tokens)]
        slots = self._pool.allocate(len(blocks)) if blocks else None
        if slots is None:
            return False
        self._swapped[request_id] = _Swapped(tokens, slots)
        self._pending.out.extend(zip(blocks, slots, strict=True))
        self.counters.blocks_out += len(slots)
        return True

    def shorten(self, request_id: str, tokens: int) -> int:
        """Keeps at most the first `tokens` tokens of a swapped request; returns how many were let go."""
        entry = self._swapped.get(request_id)
        if entry is None or entry.tokens <= tokens:
            return 0
        let_go = entry.tokens - tokens
        keep = self._blocks_of(tokens)
        self._pool.release(entry.slots[keep:])
        del entry.slots[keep:]
        entry.tokens = tokens
        if not tokens:
            del self._swapped[request_id]
        return let_go

    def swap_back(self, request_id: str, first_block: int, blocks: Sequence[int]) -> None:
        """The request is resumed: its blocks from number `first_block` on are copied into these device blocks.

        The blocks before are cached on the device and need no copy. Afterwards the request is not swapped any more.
        """
        entry = self._swapped.pop(request_id)
        slots = entry.slots[first_block:]
        self._pending.back.extend(zip(blocks, slots, strict=True))
        self._pending.slots_after.extend(entry.slots)
        self.counters.blocks_back += len(slots)

    def take_slots(self, request_id: str, first_block: int) -> list[int]:
        """The request is resumed as in `swap_back`, and its slots from block number `first_block` on are the caller's,
        to be released into the pool once they have been read. The slots before are free."""
        entry = self._swapped.pop(request_id)
        slots = entry.slots[first_block:]
        self._pool.release(entry.slots[:first_block])
        self.counters.blocks_back += len(slots)
        self.counters.blocks_back_async += len(slots)
        return slots

    def drop(self, request_id: str) -> None:
        """Frees what a swapped request has here; harmless for others."""
        self.shorten(request_id, 0)

    def take_copies(self) -> SwapCopies:
        """The copies of the step that is about to run. To be called once for every step."""
        pending, self._pending = self._pending, _Pending()
        self._pool.release(pending.slots_after)
        return SwapCopies(tuple(pending.out), tuple(pending.back))

    def check_invariants(self) -> None:
        held = [slot for entry in self._swapped.values() for slot in entry.slots]
        owned = [*held, *self._pending.slots_after]
        assert len(set(owned)) == len(owned), "a slot is owned twice"
        assert self.free_slots + len(owned) <= self.slots, "a slot is owned and free"
        for request_id, entry in self._swapped.items():
            assert entry.tokens > 0, request_id
            assert len(entry.slots) == self._blocks_of(entry.tokens), request_id

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
