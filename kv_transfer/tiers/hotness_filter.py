"""How hot the blocks of prefixes are: an approximate map of bounded size, 64-bit key -> (clock, frequency, depth).

A key belongs into two buckets of four slots, and is known there by its fingerprint only. So a key may be taken for
another one (see `false_positive_bound`); one with an entry of its own is found until that is dropped.
With 16-bit fingerprints a slot takes 13 bytes (fingerprint 2, address 4, last epoch 4, frequency 1, depth 2), and an
entry 16 to 33, since the filter doubles at 80% load; while it does, the old and the new one exist side by side.
No room is an answer, not an error: a key that is refused has the frequency 0, and what is stored stays as it is.
Source: HotPrefix section 3.2. What it says, and what is built:
    b1 = hash(f), b2 = b1 xor hash(f)    is 0 for every key: b1 = hash(x), and hash(f) is odd, so that they differ
    8-bit fingerprints always suffice    they take 3% of the unknown keys for known: the width is a parameter
    frequency of 8 bits                  saturates, and halves with age, or old heat never dies
    a sweep decrements all clocks        the clock follows from the epoch of the last access when it is read
    a failed insertion shuffles          is undone, and the filter doubles; for that an entry keeps the bits of its
                                         address that no fingerprint could give back
"""

import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]
_Hashes = NDArray[np.uint32]
_Indices = NDArray[np.intp]
_Mask = NDArray[np.bool_]

SLOTS_PER_BUCKET = 4
MAX_LOAD = 0.8  # above, relocations make a prompt of new keys take milliseconds
MAX_DEPTH_BLOCKS = 0xFFFF
_UINT32 = 0xFFFFFFFF
_MURMUR_MULTIPLIER = 0x5BD1E995


@dataclass(frozen=True, slots=True, eq=False)
class HotnessRecords:
    """What is known about the keys of a question, in their order; all 0 for an unknown key.

    A known key's frequency is 0 as well once it has decayed to nothing.
    """

    frequency: Counts
    clock_epochs: Counts
    depth_blocks: Counts


class _Columns(NamedTuple):
    """Entries, one value of each for a slot. Fingerprint 0: the slot is empty and the other values mean nothing.

    `address` is the hash of which the lowest bits are the number of the bucket that the entry is in.
    """

    fingerprint: NDArray[Any]  # the narrowest unsigned type of `fingerprint_bits`
    address: NDArray[Any]  # uint32
    last_epoch: NDArray[Any]  # uint32
    frequency: NDArray[Any]  # uint8
    depth_blocks: NDArray[Any]  # uint16


class _Entry(NamedTuple):
    fingerprint: int
    address: int
    last_epoch: int
    frequency: int
    depth_blocks: int

    def turned(self) -> "_Entry":
        """The same for the other one of its two buckets."""
        return self._replace(address=self.address ^ (self.fingerprint * _MURMUR_MULTIPLIER & _UINT32 | 1))


class HotnessFilter:
    """Counts accesses of at most `max_entries` keys.

    max_age_epochs: the clock right after an access. frequency_half_life_epochs: a frequency halves each time so many
    epochs pass without an access; None: never. initial_entries: room at the start, before the filter has to grow.
    max_relocations: displacements that one insertion tries. `rng` picks what is displaced.
    """

    def __init__(
        self,
        max_entries: int,
        *,
        fingerprint_bits: int = 16,
        max_age_epochs: int = 255,
        max_frequency: int = 255,
        frequency_half_life_epochs: int | None = None,
        initial_entries: int = 1024,
        max_relocations: int = 500,
        rng: random.Random | None = None,
    ) -> None:
        for name, value, least, most in (
            ("max_entries", max_entries, 1, 1 << 30),
            ("fingerprint_bits", fingerprint_bits, 4, 32),
            ("max_age_epochs", max_age_epochs, 1, 1 << 30),
            ("max_frequency", max_frequency, 1, 255),
            ("frequency_half_life_epochs", frequency_half_life_epochs, 1, 1 << 30),
            ("initial_entries", initial_entries, 1, 1 << 30),
            ("max_relocations", max_relocations, 0, 1 << 20),
        ):
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {value}")
        self.max_entries = max_entries
        self.epoch = 0
        self.refused = 0
        self.forgotten = 0
        self._fingerprint_bits = fingerprint_bits
        self.max_age_epochs = max_age_epochs
        self._max_frequency = max_frequency
        self._half_life_epochs = frequency_half_life_epochs
        self._max_relocations = max_relocations
        self._rng = rng or random.Random(0)
        self._entries = 0
        self._swept_epoch = 0
        self._buckets = _buckets_for(min(initial_entries, max_entries))
        self._max_buckets = _buckets_for(max_entries)
        slots = self._buckets * SLOTS_PER_BUCKET
        self._columns = _Columns(
            np.zeros(slots, np.min_scalar_type((1 << fingerprint_bits) - 1)),
            np.zeros(slots, np.uint32),
            np.zeros(slots, np.uint32),
            np.zeros(slots, np.uint8),
            np.zeros(slots, np.uint16),
        )

    def __len__(self) -> int:
        return self._entries

    @property
    def load_factor(self) -> float:
        return self._entries / (self._buckets * SLOTS_PER_BUCKET)

    @property
    def memory_bytes(self) -> int:
        return sum(column.nbytes for column in self._columns)

    @property
    def false_positive_bound(self) -> float:
        """The share of unknown keys that are taken for known: each is compared with two buckets of fingerprints."""
        return 2 * SLOTS_PER_BUCKET / (1 << self._fingerprint_bits) * self.load_factor

    def touch(self, keys: Keys, first_depth: int = 0) -> Counts:
        """One access of each key now; returns the frequencies after it, 0 for a key that is refused.

        An unknown key gets an entry of depth `first_depth` plus its index, in blocks. A key that is named twice, or two
        that share an entry, count once. When there is no room for all new keys, the first ones get it.
        """
        fingerprints, addresses = self._hash(keys)
        slots, known = self._find(fingerprints, addresses)
        accessed = slots[known]
        frequencies = np.minimum(self._frequencies(accessed) + 1, self._max_frequency)
        self._columns.frequency[accessed] = frequencies
        self._columns.last_epoch[accessed] = self.epoch & _UINT32
        result = np.zeros(len(keys), np.int64)
        result[known] = frequencies
        if len(accessed) < len(keys):
            new = np.flatnonzero(~known)
            result[new] = self._insert(
                fingerprints[new], addresses[new], np.minimum(new + first_depth, MAX_DEPTH_BLOCKS)
            )
        return result

    def look_up(self, keys: Keys) -> HotnessRecords:
        """What is known about the keys; this is not an access."""
        slots, known = self._find(*self._hash(keys))
        slots = slots[known]
        records = HotnessRecords(*np.zeros((3, len(keys)), np.int64))
        records.frequency[known] = self._frequencies(slots)
        records.clock_epochs[known] = np.maximum(0, self.max_age_epochs - self._ages_epochs(slots))
        records.depth_blocks[known] = self._columns.depth_blocks[slots]
        return records

    def remove(self, keys: Keys) -> int:
        """Drops the entries of these keys, also where other keys share them; returns how many there were."""
        slots, known = self._find(*self._hash(keys))
        return self._drop(np.unique(slots[known]))

    def advance_epoch(self, by: int = 1) -> None:
        """All entries are older by so many epochs. One without access for 2**32 epochs looks young again."""
        if by < 0:
            raise ValueError(f"by must be at least 0, not {by}")
        self.epoch += by

    def forget_cold(self) -> int:
        """Drops the entries whose clock is 0; returns how many."""
        self._swept_epoch = self.epoch
        occupied = np.flatnonzero(self._columns.fingerprint)
        dropped = self._drop(occupied[self._ages_epochs(occupied) >= self.max_age_epochs])
        self.forgotten += dropped
        return dropped

    def clear(self) -> None:
        """Drops all entries; the size, the epoch and the counters stay."""
        self._columns.fingerprint[:] = 0
        self._entries = 0

    def check_invariants(self) -> None:
        slots = np.flatnonzero(self._columns.fingerprint)
        fingerprints, addresses, _, frequencies, _ = _Columns._make(column[slots] for column in self._columns)
        assert len(slots) == self._entries <= self.max_entries, "an entry is lost or counted twice"
        assert self._buckets <= self._max_buckets, "the filter has outgrown its bound"
        assert ((addresses & (self._buckets - 1)) == slots // SLOTS_PER_BUCKET).all(), "an entry is in a foreign bucket"
        assert len(np.unique(self._identities(fingerprints, addresses))) == len(slots), (
            "two entries cannot be told apart"
        )
        assert (fingerprints.astype(np.int64) < 1 << self._fingerprint_bits).all(), "a fingerprint is too wide"
        assert ((frequencies > 0) & (frequencies <= self._max_frequency)).all(), "a frequency is out of bounds"

    def _hash(self, keys: Keys) -> tuple[_Hashes, _Hashes]:
        """Fingerprints and first addresses, from different bits of the keys after the finaliser of splitmix64."""
        mixed: Keys = np.array(keys, np.uint64)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        fingerprints = (mixed & np.uint64((1 << self._fingerprint_bits) - 1)).astype(np.uint32)
        return np.maximum(fingerprints, np.uint32(1)), (mixed >> np.uint64(32)).astype(np.uint32)

    def _both_buckets(self, fingerprints: _Hashes, addresses: _Hashes) -> _Indices:
        buckets = np.empty((len(addresses), 2), np.intp)
        buckets[:, 0] = addresses & (self._buckets - 1)
        buckets[:, 1] = other_addresses(fingerprints, addresses) & (self._buckets - 1)
        return buckets

    def _held(self, buckets: _Indices) -> _Hashes:
        """The fingerprints in these buckets: one more axis, of four."""
        held: _Hashes = self._columns.fingerprint.reshape(-1, SLOTS_PER_BUCKET)[buckets]
        return held

    def _find(self, fingerprints: _Hashes, addresses: _Hashes) -> tuple[_Indices, _Mask]:
        """The slots that hold these entries, and whether there is one at all."""
        buckets, rows = self._both_buckets(fingerprints, addresses), np.arange(len(addresses))
        same = (self._held(buckets) == fingerprints[:, None, None]).reshape(len(rows), 2 * SLOTS_PER_BUCKET)
        which = same.argmax(axis=1)
        slots = buckets[rows, which // SLOTS_PER_BUCKET] * SLOTS_PER_BUCKET + which % SLOTS_PER_BUCKET
        return slots, same[rows, which]

    def _identities(self, fingerprints: _Hashes, addresses: _Hashes) -> Keys:
        """Equal for what this filter cannot tell apart: the same fingerprint in the same two buckets."""
        buckets = self._both_buckets(fingerprints, addresses)
        identities: Keys = fingerprints.astype(np.uint64) << np.uint64(32) | np.minimum(
            buckets[:, 0], buckets[:, 1]
        ).astype(np.uint64)
        return identities

    def _ages_epochs(self, slots: _Indices) -> Counts:
        ages: NDArray[np.uint32] = np.uint32(self.epoch & _UINT32) - self._columns.last_epoch[slots]
        return ages.astype(np.int64)

    def _frequencies(self, slots: _Indices) -> Counts:
        """As of now: what is stored was right at the last access."""
        stored: Counts = self._columns.frequency[slots].astype(np.int64)
        if self._half_life_epochs is None:
            return stored
        halvings: Counts = np.minimum(self._ages_epochs(slots) // self._half_life_epochs, 63)
        return np.right_shift(stored, halvings)

    def _insert(self, fingerprints: _Hashes, addresses: _Hashes, depths_blocks: _Indices) -> _Mask:
        """Entries of one access for unknown keys; whether each has got one."""
        while self._buckets < _buckets_for(min(self._entries + len(fingerprints), self.max_entries)):
            self._grow()
        _, first, inverse = np.unique(self._identities(fingerprints, addresses), return_index=True, return_inverse=True)
        chosen = np.sort(first)
        if self._entries + len(chosen) > self.max_entries and self._swept_epoch < self.epoch:
            self.forget_cold()
        chosen = chosen[: self.max_entries - self._entries]
        entries = _Columns(
            fingerprints[chosen],
            addresses[chosen],
            np.full(len(chosen), self.epoch & _UINT32, np.uint32),
            np.ones(len(chosen), np.uint8),
            depths_blocks[chosen].astype(np.uint16),
        )
        placed = np.zeros(len(fingerprints), np.bool_)
        placed[chosen] = True
        for index in self._place_without_relocation(entries).tolist():
            if not self._place(_Entry._make(column.item(index) for column in entries)):
                placed[chosen[index]] = False
        self.refused += len(first) - int(placed.sum())
        return placed[first][inverse]

    def _place_without_relocation(self, entries: _Columns) -> _Indices:
        """Puts the entries into empty slots, and returns the indices of those that find both their buckets full.

        Each takes the emptier bucket, which keeps full pairs rare. Of several that want the same slot one gets it, and
        the others look again: each round places at least one.
        """
        waiting = np.arange(len(entries.fingerprint))
        while len(waiting):
            addresses = entries.address[waiting]
            choices = np.stack((addresses, other_addresses(entries.fingerprint[waiting], addresses)), axis=1)
            empty = self._held((choices & np.uint32(self._buckets - 1)).astype(np.intp)) == 0
            rows, emptier = np.arange(len(waiting)), empty.sum(axis=2).argmax(axis=1)
            addresses, empty = choices[rows, emptier], empty[rows, emptier]
            candidates = np.flatnonzero(empty.any(axis=1))
            if not len(candidates):
                break
            slots = (addresses & np.uint32(self._buckets - 1)).astype(np.intp) * SLOTS_PER_BUCKET + empty.argmax(axis=1)
            taken, winners = np.unique(slots[candidates], return_index=True)
            winners = candidates[winners]
            for column, values in zip(self._columns, entries, strict=True):
                column[taken] = values[waiting[winners]]
            self._columns.address[taken] = addresses[winners]
            self._entries += len(taken)
            waiting = np.delete(waiting, winners)
        return waiting

    def _place(self, entry: _Entry) -> bool:
        """Puts in one entry, by relocation of others where it must be. False: refused, nothing is changed."""
        while not (self._put(entry) or self._put(entry.turned()) or self._relocate(entry)):
            if self._buckets < self._max_buckets:
                self._grow()
            elif self._swept_epoch == self.epoch or not self.forget_cold():
                return False
        self._entries += 1
        return True

    def _put(self, entry: _Entry) -> bool:
        """Writes the entry into an empty slot of the bucket of its address, if there is one."""
        first = (entry.address & (self._buckets - 1)) * SLOTS_PER_BUCKET
        held = self._columns.fingerprint[first : first + SLOTS_PER_BUCKET].tolist()
        if 0 not in held:
            return False
        self._exchange(first + held.index(0), entry)
        return True

    def _relocate(self, entry: _Entry) -> bool:
        """Displaces a random entry, which displaces one from its own other bucket, until one finds an empty slot."""
        path: list[int] = []
        moving = entry if self._rng.getrandbits(1) else entry.turned()
        for _ in range(self._max_relocations):
            bucket = moving.address & (self._buckets - 1)
            path.append(bucket * SLOTS_PER_BUCKET + self._rng.randrange(SLOTS_PER_BUCKET))
            moving = self._exchange(path[-1], moving).turned()
            if self._put(moving):
                return True
        self._undo(path, moving)
        return False

    def _undo(self, path: list[int], moving: _Entry) -> None:
        """Puts the displaced entries back; the one that began it is out again."""
        for slot in reversed(path):
            moving = self._exchange(slot, moving.turned())

    def _exchange(self, slot: int, entry: _Entry) -> _Entry:
        held = _Entry._make(column.item(slot) for column in self._columns)
        for column, value in zip(self._columns, entry, strict=True):
            column[slot] = value
        return held

    def _grow(self) -> None:
        """Doubles the buckets. One more bit of its address says which copy of a bucket an entry belongs into.

        It stays in its place there, so this cannot fail. Keys that shared an entry may part: it stays with its own key.
        """
        self._buckets *= 2
        self._columns = _Columns._make(np.concatenate((column, column)) for column in self._columns)
        owners = np.arange(self._buckets * SLOTS_PER_BUCKET, dtype=np.uint32) // SLOTS_PER_BUCKET
        self._columns.fingerprint[(self._columns.address & (self._buckets - 1)) != owners] = 0

    def _drop(self, slots: _Indices) -> int:
        self._columns.fingerprint[slots] = 0
        self._entries -= len(slots)
        return len(slots)


def other_addresses(fingerprints: _Hashes, addresses: _Hashes) -> _Hashes:
    """Addresses of the other buckets of these entries; the other of the other is the first again."""
    return addresses ^ (fingerprints * np.uint32(_MURMUR_MULTIPLIER) | np.uint32(1))


def _buckets_for(entries: int) -> int:
    """The smallest power of two that holds so many entries."""
    needed = math.ceil(entries / (SLOTS_PER_BUCKET * MAX_LOAD))
    return 1 << (needed - 1).bit_length()
