"""What the steps of a simulated engine share: the prompt blocks that are read together, and the link to host memory."""

import math
from collections import Counter, deque

from kv_transfer.host_memory.copy_worker import CopyReport


class Readers:
    """Which prompt blocks are read by those that decode, and how many tokens are read more than once."""

    def __init__(self, block_tokens: int) -> None:
        self.names: dict[str, list[int]] = {}
        self.repeated_tokens = 0
        self._block_tokens = block_tokens
        self._references: dict[int, int] = {}

    def join(self, name: str, blocks: list[int]) -> None:
        self.names[name] = blocks
        repeated, references = 0, self._references
        for block in blocks:
            readers = references.get(block, 0)
            references[block] = readers + 1
            repeated += readers > 0
        self.repeated_tokens += repeated * self._block_tokens

    def leave(self, name: str) -> None:
        repeated, references = 0, self._references
        for block in self.names.pop(name, ()):
            readers = references[block] - 1
            if readers:
                references[block] = readers
                repeated += 1
            else:
                del references[block]
        self.repeated_tokens -= repeated * self._block_tokens


class Copies:
    """Copies in the background, one after the other: (end, number, direction, seconds) of each."""

    def __init__(self) -> None:
        self.under_way: deque[tuple[float, int, str, float]] = deque()
        self._free_s = 0.0

    def begin(self, number: int, direction: str, seconds: float, now_s: float) -> None:
        self._free_s = max(self._free_s, now_s) + seconds
        self.under_way.append((self._free_s, number, direction, seconds))

    def next_s(self) -> float:
        return self.under_way[0][0] if self.under_way else math.inf

    def ended(self, now_s: float) -> CopyReport | None:
        """Those that have ended since the last call."""
        if self.next_s() > now_s:
            return None
        ended: Counter[int] = Counter()
        seconds: Counter[str] = Counter()
        while self.next_s() <= now_s:
            _, number, direction, each_s = self.under_way.popleft()
            ended[number] += 1
            seconds[direction] += each_s  # type: ignore[assignment]
        return CopyReport(ended, set(), seconds)
