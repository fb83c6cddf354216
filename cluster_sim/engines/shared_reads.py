"""The prompt blocks that are read together in a step: how many tokens are read more than once."""

from collections.abc import Hashable


class Readers:
    """Which prompt blocks are read by the jobs that decode."""

    def __init__(self, block_tokens: int) -> None:
        # The blocks of each job.
        self.names: dict[Hashable, list[int]] = {}
        # Of all reads of a token in one step, those after the first.
        self.repeated_tokens = 0
        self._block_tokens = block_tokens
        self._references: dict[int, int] = {}

    def join(self, name: Hashable, blocks: list[int]) -> None:
        self.names[name] = blocks
        repeated, references = 0, self._references
        for block in blocks:
            readers = references.get(block, 0)
            references[block] = readers + 1
            repeated += readers > 0
        self.repeated_tokens += repeated * self._block_tokens

    def leave(self, name: Hashable) -> None:
        repeated, references = 0, self._references
        for block in self.names.pop(name, ()):
            readers = references[block] - 1
            if readers:
                references[block] = readers
                repeated += 1
            else:
                del references[block]
        self.repeated_tokens -= repeated * self._block_tokens
