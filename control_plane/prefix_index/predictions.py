"""Which prefixes workers will hold because requests were sent there, and until when that is believed. Pure.

A prompt's first chunk names its family: all that two prompts share begins with it, as names cover what stands before.
So where the prompts of a family on one worker are sorted, what one shares with any other it shares with one beside it:
one that ends takes as much work as it has chunks, however many begin alike, and what still goes on keeps its chunks.
Times are on the clock of the caller.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.claims.prefix_chunks import Keys


@dataclass(slots=True)
class _Family:
    """Of one worker. prompts: the keys of each as bytes, sorted. expiries: the same as a heap."""

    prompts: list[bytes] = field(default_factory=list)
    expiries: list[tuple[float, bytes]] = field(default_factory=list)

    def due(self, now_s: float) -> list[bytes]:
        """Those that have ended. Takes as much as there are of them."""
        found, looked_at = [], [0]
        # What stands below one in a heap ends no sooner.
        while looked_at:
            at = looked_at.pop()
            if at < len(self.expiries) and self.expiries[at][0] <= now_s:
                found.append(self.expiries[at][1])
                looked_at += (2 * at + 1, 2 * at + 2)
        return found


class Predictions:
    """Of workers by their slot in the index. `add`, then `expire` as time goes on; `ended` asks and changes nothing.

    compared: chunks so far that were compared, of those that ended with those beside them.
    """

    def __init__(self) -> None:
        # By first chunk, then by slot.
        self._families: dict[int, dict[int, _Family]] = {}
        self._expiries: list[tuple[float, int, int]] = []
        self.compared = 0

    def __len__(self) -> int:
        return sum(len(family.prompts) for family in self._all())

    def add(self, slot: int, keys: Keys, until_s: float) -> None:
        first, prompt = int(keys[0]), keys.tobytes()
        family = self._families.setdefault(first, {}).setdefault(slot, _Family())
        insort(family.prompts, prompt)
        heapq.heappush(family.expiries, (until_s, prompt))
        heapq.heappush(self._expiries, (until_s, first, slot))

    def ended(self, first: int, now_s: float) -> Mapping[int, Keys]:
        """By slot, the chunks of this family that nothing predicts any more at that time."""
        if not self._expiries or self._expiries[0][0] > now_s:
            return {}
        families = self._families.get(first, {}).items()
        chunks = {slot: self._without(family.prompts.copy(), family.due(now_s)) for slot, family in families}
        return {slot: keys for slot, keys in chunks.items() if len(keys)}

    def expire(self, now_s: float) -> list[tuple[int, Keys]]:
        """Forgets what has ended; slots with the chunks that nothing predicts any more."""
        due: dict[tuple[int, int], None] = {}
        while self._expiries and self._expiries[0][0] <= now_s:
            _, first, slot = heapq.heappop(self._expiries)
            if slot in self._families.get(first, {}):
                due[first, slot] = None
        over = []
        for first, slot in due:
            family, ended = self._families[first][slot], []
            while family.expiries and family.expiries[0][0] <= now_s:
                ended.append(heapq.heappop(family.expiries)[1])
            over.append((slot, self._without(family.prompts, ended)))
            if not family.prompts:
                self._drop(first, slot)
        return over

    def forget(self, slot: int) -> None:
        """The worker is gone. O(families)."""
        for first in [first for first, by_slot in self._families.items() if slot in by_slot]:
            self._drop(first, slot)

    def check_invariants(self) -> None:
        for family in self._all():
            assert family.prompts == sorted(prompt for _, prompt in family.expiries), "a prompt is out of order"
            assert family.prompts, "a family of nothing"

    def _without(self, prompts: list[bytes], ended: list[bytes]) -> Keys:
        """Takes them out; the chunks that no other prompt has then. Of several that share something the last one gives
        it up."""
        over = [np.empty(0, dtype=np.uint64)]
        for prompt in ended:
            at = bisect_left(prompts, prompt)
            del prompts[at]
            keys = _keys(prompt)
            shared = max((self._common(keys, _keys(beside)) for beside in prompts[max(at - 1, 0) : at + 1]), default=0)
            over.append(keys[shared:])
        found: Keys = np.concatenate(over)
        return found

    def _common(self, one: Keys, other: Keys) -> int:
        """How many chunks they share."""
        length = min(len(one), len(other))
        self.compared += length
        differ = np.flatnonzero(one[:length] != other[:length])
        return int(differ[0]) if len(differ) else length

    def _all(self) -> Iterator[_Family]:
        return (family for by_slot in self._families.values() for family in by_slot.values())

    def _drop(self, first: int, slot: int) -> None:
        del self._families[first][slot]
        if not self._families[first]:
            del self._families[first]


def _keys(prompt: bytes) -> Keys:
    return np.frombuffer(prompt, dtype=np.uint64)
