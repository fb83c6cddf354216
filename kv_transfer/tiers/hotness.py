"""How hot a prefix is: accesses and recency of every block, resident or not, in bounded memory.

A prompt counts once for each of its full blocks, whether they hit or not and however often its chunks are scheduled.
What is remembered lies in the hotness filter (`kv_transfer.tiers.hotness_filter`), keyed by the block's hash, of which
the tenant's cache salt is a part: nothing here crosses tenants. Source: HotPrefix section 3.2.
"""

import operator
import re
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from kv_transfer.blocks import BlockHash
from kv_transfer.tiers.hotness_filter import HotnessFilter


class Hotness(NamedTuple):
    """Of one block, as of its last access."""

    # 0: unknown, or refused by the full filter.
    frequency: int
    last_access_epoch: int
    # Since the access before, to half an epoch; means nothing where the frequency is 1 or less.
    gap_requests: float


_UNKNOWN = Hotness(0, 0, 0.0)


class HotnessTracker:
    """Counts accesses. requests_per_epoch: prompts after which clocks fall by one.

    What prompts ask for lies in a dictionary as well until it is forgotten: policies look it up often, one by one.
    """

    def __init__(self, hotness_filter: HotnessFilter, requests_per_epoch: int = 1) -> None:
        if requests_per_epoch < 1:
            raise ValueError(f"requests_per_epoch must be at least 1, not {requests_per_epoch}")
        self.filter = hotness_filter
        # Prompts so far.
        self.requests = 0
        self._requests_per_epoch = requests_per_epoch
        self._near: dict[BlockHash, Hotness] = {}

    def __len__(self) -> int:
        """Blocks that lie in the dictionary."""
        return len(self._near)

    @property
    def epoch(self) -> int:
        return self.filter.epoch

    def accessed(self, hashes: Sequence[BlockHash], first_depth: int = 0) -> None:
        """One prompt asks for these blocks; the first of them lies so many blocks deep, and 0 begins a prompt."""
        self.requests += not first_depth
        if not first_depth and self.requests % self._requests_per_epoch == 0:
            self.filter.advance_epoch()
        if not hashes:
            return
        keys = keys_of(hashes)
        ages_epochs = self.filter.max_age_epochs - self.filter.look_up(keys).clock_epochs
        gaps_requests = ((ages_epochs + 0.5) * self._requests_per_epoch).tolist()
        frequencies = self.filter.touch(keys, first_depth).tolist()
        records = zip(frequencies, repeat(self.filter.epoch), gaps_requests)
        self._near.update(zip(hashes, map(Hotness._make, records), strict=True))

    def hotness(self, block_hash: BlockHash) -> Hotness:
        """Of a block that a prompt asked for and that is not forgotten; of others nothing is known here."""
        return self._near.get(block_hash, _UNKNOWN)

    def clock(self, hotness: Hotness) -> int:
        """Epochs until the last access counts no more."""
        return max(0, self.filter.max_age_epochs - (self.filter.epoch - hotness.last_access_epoch))

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks lie in no tier any more: the filter alone remembers them."""
        for each in hashes:
            self._near.pop(each, None)

    def clear(self) -> None:
        self.filter.clear()
        self._near.clear()


def keys_of(hashes: Sequence[BlockHash]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """64 bits of each hash."""
    if isinstance(hashes[0], int):
        return np.array(hashes, dtype=np.uint64)
    return np.frombuffer(b"".join([each[:8] for each in hashes]), dtype=np.uint64)  # type: ignore[index]


_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": lambda x, y: x / max(y, 1),
}
_FORMULA = re.compile(r"\s*(\w+)\s*([+*/])\s*(\w+)(?:\s*([+*/])\s*(\w+))?\s*")


class Formula:
    """`x op y` or `x op y op z` over clock, frequency and length, usual precedence; what divides is at least 1.

    length: of the run, in blocks. In tokens, as the paper has it, the term vanishes for long runs.
    Raises ValueError for anything else. Source: HotPrefix section 4 and equations 5 and 6.
    """

    TERMS = ("clock", "frequency", "length")

    def __init__(self, text: str) -> None:
        self.text = text
        found = _FORMULA.fullmatch(text)
        terms = [found[index] for index in (1, 3, 5) if found[index]] if found else []
        if found is None or any(term not in self.TERMS for term in terms):
            raise ValueError(
                f"formula {text!r} is not 'x op y op z' with x, y, z of {', '.join(self.TERMS)} and op of + * /"
            )
        self._terms = [self.TERMS.index(term) for term in terms]
        self._operators = [_OPERATORS[found[index]] for index in (2, 4) if found[index]]
        self._second_first = found[2] == "+" != found[4]

    def __call__(self, *, clock: int, frequency: int, length: int) -> float:
        values = (clock, frequency, length)
        first, second, *third = self._terms
        if not third:
            return self._operators[0](values[first], values[second])
        one, other = self._operators
        if self._second_first:
            return one(values[first], other(values[second], values[third[0]]))
        return other(one(values[first], values[second]), values[third[0]])
