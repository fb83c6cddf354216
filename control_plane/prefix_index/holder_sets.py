"""Which workers hold a prefix, as a number: each set of (tier, worker) that occurs is kept once.

Thousands of chunks lie on the same workers, so that an entry of the index needs four bytes for its holders however many
workers there are, and a worker that is gone leaves all entries at once: its bits are cleared in the sets, not in the
entries. Set 0 is nobody; set 1 is not known, of a chunk that was asked for and that no worker has claimed.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

SetIds: TypeAlias = "NDArray[np.uint32]"

NOBODY = 0
UNKNOWN = 1


class Plane(IntEnum):
    """In which way a worker holds a chunk. PREDICTED: it was sent a request that will leave it there."""

    DEVICE = 0
    HOST = 1
    PREDICTED = 2


Masks = tuple[int, int, int]
_NOTHING: Masks = (0, 0, 0)


class HolderSets:
    """By set a mask of worker slots for each plane."""

    def __init__(self) -> None:
        self._masks: list[Masks] = [_NOTHING, _NOTHING]
        self._ids: dict[Masks, int] = {_NOTHING: NOBODY}
        self._changes: dict[tuple[int, Plane, int, bool], int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def masks(self, set_id: int) -> Masks:
        return self._masks[set_id]

    def changed(self, set_id: int, plane: Plane, slot: int, present: bool) -> int:
        """The set that differs by this one holder, or the same one."""
        change = (set_id, plane, slot, present)
        known = self._changes.get(change)
        if known is None:
            known = self._changes[change] = self._interned(_with(self._masks[set_id], plane, slot, present))
        return known

    def changed_all(self, set_ids: SetIds, plane: Plane, slot: int, present: bool) -> SetIds:
        """`changed` of each; a new array."""
        different, places = np.unique(set_ids, return_inverse=True)
        changed = [self.changed(each, plane, slot, present) for each in different.tolist()]
        return np.array(changed, dtype=np.uint32)[places]

    def without(self, slot: int) -> None:
        """The worker in this slot holds nothing any more. O(sets)."""
        kept = ~(1 << slot)
        self._masks = [(device & kept, host & kept, predicted & kept) for device, host, predicted in self._masks]
        self._ids = {}
        for set_id, masks in enumerate(self._masks):
            self._ids.setdefault(masks, set_id)
        self._changes.clear()

    def compacted(self, used: NDArray[np.bool_]) -> SetIds:
        """Forgets sets that are not used, and one of two that are equal. Returns by old set the new one.

        used: by set, whether an entry refers to it.
        """
        masks = self._masks
        self._masks, self._ids = [_NOTHING, _NOTHING], {_NOTHING: NOBODY}
        self._changes.clear()
        moved = np.zeros(len(masks), dtype=np.uint32)
        for set_id in np.flatnonzero(used).tolist():
            moved[set_id] = self._interned(masks[set_id])
        moved[UNKNOWN] = UNKNOWN
        return moved

    def holding(self, plane: Plane, slot: int) -> NDArray[np.bool_]:
        """By set, whether the worker in this slot is in it."""
        return np.array([masks[plane] >> slot & 1 for masks in self._masks], dtype=np.bool_)

    def _interned(self, masks: Masks) -> int:
        known = self._ids.get(masks)
        if known is None:
            known = self._ids[masks] = len(self._masks)
            self._masks.append(masks)
        return known


def slots_in(mask: int) -> Iterator[int]:
    """The slots of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _with(masks: Masks, plane: Plane, slot: int, present: bool) -> Masks:
    changed = list(masks)
    changed[plane] = changed[plane] | 1 << slot if present else changed[plane] & ~(1 << slot)
    return (changed[0], changed[1], changed[2])
