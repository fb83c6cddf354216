"""The hotness of one family of prefixes as it lies in Redis: which chunks, and how often they were asked for, decayed.

A snapshot sums up a stream of accesses until one of its entries; a router that starts takes it in and goes on from
there. Its hottest chunks are kept. Layout: name of that entry (two big-endian uint64), then zlib of the sorted keys
(uint64) and the log2 of their counts at that time (float32), both little-endian.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.claims.claims import no_keys
from kv_transfer.claims.prefix_chunks import Keys

_NAME = struct.Struct(">QQ")
NAME_BYTES = _NAME.size
_MOST_ORDINAL = (1 << 64) - 1
_ENTRY_BYTES = 12
_MOST_BYTES = 1 << 26


class DamagedSnapshotError(ValueError):
    """Bytes that are no snapshot of hotness."""


class EntryName(NamedTuple):
    """The id that Redis gave an entry: its clock in ms, and a number within that."""

    ms: int
    ordinal: int

    @property
    def at_s(self) -> float:
        return self.ms / 1000

    def next(self) -> "EntryName":
        return EntryName(self.ms, self.ordinal + 1) if self.ordinal < _MOST_ORDINAL else EntryName(self.ms + 1, 0)

    def before(self) -> "EntryName":
        return EntryName(self.ms, self.ordinal - 1) if self.ordinal else EntryName(self.ms - 1, _MOST_ORDINAL)

    def __str__(self) -> str:
        return f"{self.ms}-{self.ordinal}"


BEGINNING = EntryName(0, 0)


class Access(NamedTuple):
    """A request's chunks, and when it came, in seconds."""

    keys: Keys
    at_s: float


class HotnessSnapshot(NamedTuple):
    """What a stream of accesses comes to."""

    # The last entry that is in it.
    until: EntryName
    keys: Keys
    # log2 of the decayed requests at the time of that entry.
    counts: NDArray[np.float32]


def entry_name(name: bytes) -> EntryName:
    ms, ordinal = name.split(b"-")
    return EntryName(int(ms), int(ordinal))


def summed_up(
    base: HotnessSnapshot | None, accesses: Sequence[Access], until: EntryName, half_life_s: float, at_most: int
) -> HotnessSnapshot:
    """The snapshot after these accesses, which end with entry `until`, of so many hottest chunks."""
    keys = [base.keys] if base is not None else []
    weights = []
    if base is not None:
        weights.append(np.exp2(base.counts.astype(np.float64) - (until.at_s - base.until.at_s) / half_life_s))
    for access in accesses:
        keys.append(access.keys)
        weights.append(np.full(len(access.keys), 2.0 ** ((access.at_s - until.at_s) / half_life_s)))
    if not keys:
        return HotnessSnapshot(until, no_keys(), np.empty(0, dtype=np.float32))
    different, places = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(places, weights=np.concatenate(weights), minlength=len(different))
    hottest = np.sort(np.argsort(-counts, kind="stable")[:at_most])
    with np.errstate(divide="ignore"):
        return HotnessSnapshot(until, different[hottest], np.log2(counts[hottest]).astype(np.float32))


def encode_snapshot(snapshot: HotnessSnapshot) -> bytes:
    body = snapshot.keys.astype("<u8", copy=False).tobytes() + snapshot.counts.astype("<f4", copy=False).tobytes()
    return _NAME.pack(*snapshot.until) + zlib.compress(body, 1)


def decode_snapshot(data: bytes) -> HotnessSnapshot:
    """Raises DamagedSnapshotError."""
    inflater = zlib.decompressobj()
    try:
        name = EntryName(*_NAME.unpack_from(data))
        body = inflater.decompress(data[NAME_BYTES:], _MOST_BYTES)
    except (struct.error, zlib.error) as error:
        raise DamagedSnapshotError(str(error)) from None
    entries, rest = divmod(len(body), _ENTRY_BYTES)
    if rest or not inflater.eof:
        raise DamagedSnapshotError(f"{len(body)} bytes are no whole number of chunks, or are cut off")
    keys = np.frombuffer(body, dtype="<u8", count=entries)
    counts = np.frombuffer(body, dtype="<f4", offset=8 * entries)
    if np.isnan(counts).any() or (counts > math.log2(1 << 62)).any():
        raise DamagedSnapshotError("counts that nothing can have")
    return HotnessSnapshot(name, keys, counts)
