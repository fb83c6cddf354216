"""Which prefixes workers will hold because requests were sent there, and until when that is believed. Pure.

A prompt's first chunk names its family: all that two prompts share begins with it, so that predictions of one family on
one worker are withdrawn together, and what still goes on keeps its chunks. Times are on the clock of the caller.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kv_transfer.claims.prefix_chunks import Keys


@dataclass(frozen=True, slots=True, eq=False)
class _Prediction:
    until_s: float
    keys: Keys


class Predictions:
    """Of workers by their slot in the index. `add`, then `expire` as time goes on; `ended` asks and changes nothing."""

    def __init__(self) -> None:
        # By first chunk, then by slot.
        self._families: dict[int, dict[int, list[_Prediction]]] = {}
        self._expiries: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return sum(len(each) for by_slot in self._families.values() for each in by_slot.values())

    def add(self, slot: int, keys: Keys, until_s: float) -> None:
        first = int(keys[0])
        self._families.setdefault(first, {}).setdefault(slot, []).append(_Prediction(until_s, keys))
        heapq.heappush(self._expiries, (until_s, first, slot))

    def ended(self, first: int, now_s: float) -> Mapping[int, Keys]:
        """By slot, the chunks of this family that nothing predicts any more at that time."""
        if not self._expiries or self._expiries[0][0] > now_s:
            return {}
        chunks = {slot: _ended(those, now_s) for slot, those in self._families.get(first, {}).items()}
        return {slot: keys for slot, keys in chunks.items() if len(keys)}

    def expire(self, now_s: float) -> list[tuple[int, Keys]]:
        """Forgets what has ended; slots with the chunks that nothing predicts any more."""
        due: set[tuple[int, int]] = set()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, first, slot = heapq.heappop(self._expiries)
            if slot in self._families.get(first, {}):
                due.add((first, slot))
        over = []
        for first, slot in due:
            family = self._families[first]
            over.append((slot, _ended(family[slot], now_s)))
            family[slot] = [each for each in family[slot] if each.until_s > now_s]
            self._drop_if_empty(first, slot)
        return over

    def forget(self, slot: int) -> None:
        """The worker is gone. O(families)."""
        for first in [first for first, by_slot in self._families.items() if slot in by_slot]:
            self._families[first][slot].clear()
            self._drop_if_empty(first, slot)

    def _drop_if_empty(self, first: int, slot: int) -> None:
        family = self._families[first]
        if not family[slot]:
            del family[slot]
        if not family:
            del self._families[first]


def _ended(those: list[_Prediction], now_s: float) -> Keys:
    ended = [each.keys for each in those if each.until_s <= now_s]
    if not ended:
        return np.empty(0, dtype=np.uint64)
    over: Keys = np.unique(np.concatenate(ended))
    going_on = [each.keys for each in those if each.until_s > now_s]
    return over[~np.isin(over, np.concatenate(going_on))] if going_on else over
