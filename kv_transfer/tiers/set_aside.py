"""Cached device blocks that a radix prefix tree does not count on: second copies, and blocks without their parents.

Who may need which of them again:
    a spare    a second copy of a block that the tree has: steps in when the first one leaves the device
    a stray    its parent has left the device: it can be reached no more, and waits until the pool takes it
A block whose parents were never there is both: nothing leads to it until they have come.
"""

from collections.abc import Iterable

from kv_transfer.blocks import BlockHash


class SetAside:
    """See the module."""

    def __init__(self) -> None:
        # All of them, by block.
        self.blocks: dict[int, BlockHash] = {}
        # Those among them that may step in, by hash.
        self.spares: dict[BlockHash, list[int]] = {}

    def add_spare(self, block: int, block_hash: BlockHash) -> None:
        self.forget(block)
        self.blocks[block] = block_hash
        self.spares.setdefault(block_hash, []).append(block)

    def add_strays(self, blocks: Iterable[tuple[int, BlockHash]]) -> None:
        self.blocks.update(blocks)

    def take_spare(self, block_hash: BlockHash) -> int | None:
        """A second copy of this block, for the tree to count on from now on."""
        spares = self.spares.get(block_hash)
        if not spares:
            return None
        spare = spares.pop()
        if not spares:
            del self.spares[block_hash]
        del self.blocks[spare]
        return spare

    def forget(self, block: int) -> bool:
        """A block leaves the device, or the tree counts on it from now on. False: it was not here."""
        block_hash = self.blocks.pop(block, None)
        if block_hash is None:
            return False
        spares = self.spares.get(block_hash)
        if spares is not None and block in spares:
            spares.remove(block)
            if not spares:
                del self.spares[block_hash]
        return True

    def clear(self) -> None:
        self.blocks.clear()
        self.spares.clear()

    def check_invariants(self) -> None:
        assert all(each in self.blocks for spares in self.spares.values() for each in spares), "a spare is unknown"
