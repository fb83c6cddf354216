"""A table from 64-bit keys to holders and heat, of fixed size, for whole prompts at once.

Places stand in rows of eight; a key belongs into one of two rows, given by its upper and its lower half. Where both are
full, the coldest of the sixteen gives way, or the new key when it is colder still: so the table never grows, never
stops to be rearranged, and drops what is coldest, as far as sixteen samples tell. A place takes 16 bytes; a table as
full as it was made for takes 22 for each entry, and then hardly a key has to give way. Keys are hashes already.

Sources: two-choice hashing with buckets (Azar et al., "Balanced allocations", 1994); set-associative caches.
"""

import math

import numpy as np
from numpy.typing import NDArray

from control_plane.prefix_index.holder_sets import UNKNOWN
from kv_transfer.claims.prefix_chunks import NO_KEY, Keys

Places = NDArray[np.int64]

_ROW = 8
# Fuller than this, keys give way to each other although there is room elsewhere.
_FULL = 0.75
_HALF_BITS = np.uint64(32)
_LOWER_HALF = np.uint64(0xFFFFFFFF)
NOWHERE = -1


class PrefixTable:
    """Has room for so many entries. `keys`, `sets` and `heat` are columns over places."""

    def __init__(self, entries: int) -> None:
        self._rows = max(2, math.ceil(entries / _FULL / _ROW))
        places = self._rows * _ROW
        # Zeroed memory is the operating system's until it is written to. `NO_KEY` marks a free place.
        self.keys: Keys = np.zeros(places, dtype=np.uint64)
        self.sets: NDArray[np.uint32] = np.zeros(places, dtype=np.uint32)
        # A logarithm to the base of 2, -inf for what was never asked for.
        self.heat: NDArray[np.float32] = np.zeros(places, dtype=np.float32)
        self.entries = 0
        # Keys that had to give way.
        self.dropped = 0

    @property
    def capacity(self) -> int:
        return len(self.keys)

    @property
    def bytes(self) -> int:
        return int(self.keys.nbytes + self.sets.nbytes + self.heat.nbytes)

    def find(self, keys: Keys) -> Places:
        """The place of each key, or NOWHERE."""
        rows = self._rows_of(keys)
        # Whole rows are read: a quarter faster than place by place.
        equal = (self.keys.reshape(-1, _ROW).take(rows, axis=0) == keys[:, None, None]).reshape(len(keys), 2 * _ROW)
        column = equal.argmax(axis=1)
        each = np.arange(len(keys))
        found = rows[each, column // _ROW] * _ROW + column % _ROW
        places: Places = np.where(equal[each, column], found, NOWHERE)
        return places

    def find_or_add(self, keys: Keys, heat: float, worth: float) -> Places:
        """As `find`; what was missing is added with this heat, NOWHERE where all others are hotter than it is worth."""
        places = self.find(keys)
        is_missing = places == NOWHERE
        if is_missing.any():
            # While they come in they do not give way to each other.
            self._add(np.unique(keys[is_missing]), worth)
            places = self.find(keys)
            self.heat[places[is_missing & (places != NOWHERE)]] = heat
        return places

    def used(self) -> Places:
        """Places that are not free. O(capacity)."""
        return np.flatnonzero(self.keys)

    def _candidates(self, keys: Keys) -> Places:
        """(n, 16): the places where each key may stand."""
        return (self._rows_of(keys)[:, :, None] * _ROW + _COLUMNS).reshape(len(keys), 2 * _ROW)

    def _rows_of(self, keys: Keys) -> Places:
        """(n, 2): the rows into which each key belongs."""
        rows = np.empty((len(keys), 2), dtype=np.int64)
        rows[:, 0] = (keys >> _HALF_BITS) * np.uint64(self._rows) >> _HALF_BITS
        rows[:, 1] = (keys & _LOWER_HALF) * np.uint64(self._rows) >> _HALF_BITS
        return rows

    def _add(self, missing: Keys, worth: float) -> None:
        """Each of these takes the coldest of its places, free ones first, of the emptier row.

        Two that want the same place in one round: the first takes it, the other chooses again.
        """
        missing = missing[missing != NO_KEY]
        while len(missing):
            candidates = self._candidates(missing)
            free = self.keys[candidates] == NO_KEY
            by_row = free.reshape(-1, 2, _ROW)
            crowded = by_row.sum(axis=2).argmin(axis=1)
            coldness = np.where(free, -np.inf, self.heat[candidates])
            # A free place in the emptier row is better than one in the other.
            rank = np.where(free, 0.0, 1.0)
            rank.reshape(-1, 2, _ROW)[np.arange(len(missing)), crowded] += np.where(free.any(axis=1), 0.5, 0.0)[:, None]
            column = np.lexsort((coldness, rank), axis=1)[:, 0]
            each = np.arange(len(missing))
            chosen, is_free = candidates[each, column], free[each, column]
            fits = is_free | (self.heat[chosen] <= worth)
            self.dropped += int(len(missing) - fits.sum())
            missing, chosen, is_free = missing[fits], chosen[fits], is_free[fits]
            chosen, first = np.unique(chosen, return_index=True)
            self.entries += int(is_free[first].sum())
            self.dropped += int(len(first) - is_free[first].sum())
            self.keys[chosen] = missing[first]
            self.sets[chosen] = UNKNOWN
            self.heat[chosen] = worth
            missing = np.delete(missing, first)


_COLUMNS = np.arange(_ROW)
