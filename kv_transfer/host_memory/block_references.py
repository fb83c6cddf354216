"""Blocks or slots of one memory, each with a count of its references: of the tree, of requests, of copies that run.

What has no reference is free and may be given out again; nothing is given out twice.
"""

from collections.abc import Iterable, Sequence


class BlockReferences:
    """`size` blocks, numbered from 0; all are free at first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._count = [0] * size
        self._free = list(range(size - 1, -1, -1))
        # Blocks with more than one reference.
        self.shared = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def count(self, block: int) -> int:
        return self._count[block]

    def allocate(self, number: int) -> list[int] | None:
        """That many blocks with one reference each; None where so many are not free, and nothing changes."""
        if number > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(number)]
        for block in taken:
            self._count[block] = 1
        return taken

    def refer(self, blocks: Iterable[int]) -> None:
        """One more reference to each; they are in use already."""
        for block in blocks:
            assert self._count[block] > 0, f"block {block} is free"
            self._count[block] += 1
            self.shared += self._count[block] == 2

    def release(self, blocks: Sequence[int]) -> list[int]:
        """One reference less to each. Returns those that are free now."""
        freed = []
        for block in blocks:
            assert self._count[block] > 0, f"block {block} is free"
            self._count[block] -= 1
            self.shared -= self._count[block] == 1
            if not self._count[block]:
                freed.append(block)
        self._free.extend(reversed(freed))
        return freed

    def check_invariants(self) -> None:
        assert sorted(self._free) == [block for block, count in enumerate(self._count) if not count]
        assert self.shared == sum(count > 1 for count in self._count)
