"""Which device blocks are held by requests that no plan moves: leased prompts, and what is being loaded. Pure.

What such a request holds does not change: it is counted when it is first seen, and not with every step. Prompts that
begin alike hold the same blocks in front. Each of those is counted once, however many hold it, and costs no contender
anything.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol


class Block(Protocol):
    """Of vLLM."""

    @property
    def block_id(self) -> int: ...


class LeasedBlocks:
    """Its length is the number of different blocks."""

    def __init__(self) -> None:
        # With the list that it was read from: who lets blocks go and gets others has another one.
        self._of_request: dict[str, tuple[Sequence[Block], list[int]]] = {}
        self._holders = Counter[int]()

    def __len__(self) -> int:
        return len(self._holders)

    def look(self, holders: Mapping[str, Sequence[Block]]) -> None:
        """holders: all there are now, by name, each with vLLM's own list of its blocks."""
        for name in self._of_request.keys() - holders.keys():
            self._forget(name)
        for name, blocks in holders.items():
            seen, numbers = self._of_request.get(name, ((), []))
            if seen is not blocks or len(numbers) != len(blocks):
                self._forget(name)
                numbers = [block.block_id for block in blocks]
                self._of_request[name] = blocks, numbers
                self._holders.update(numbers)

    def in_front(self, blocks: Sequence[Block]) -> int:
        """How many of a request's blocks they are. They lie in front: a block is shared with all before it."""
        if not blocks or blocks[0].block_id not in self._holders:
            return 0
        return bisect_left(range(len(blocks)), True, key=lambda index: blocks[index].block_id not in self._holders)

    def _forget(self, name: str) -> None:
        _, numbers = self._of_request.pop(name, ((), []))
        for block in numbers:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
