"""What a worker says of its cached prefixes: which chunks lie in which tier. Batches and snapshots, as they travel.

A claim is a state, not a step: "chunk k lies on the device", so that hearing it twice changes nothing. What a batch
says of one chunk and tier is its state after the batch, once.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError
from rachis.v1 import worker_pb2 as wire

from kv_transfer.claims.prefix_chunks import Keys

_KEY = np.dtype("<u8")
# zlib's fastest: keys look random, what can be saved is their order, which snapshots give up by sorting.
_COMPRESSION_LEVEL = 1
_RAW, _COMPRESSED = b"\x00", b"\x01"
# No batch is longer; what says otherwise is damaged. A snapshot of 16 million claims fits.
_MOST_BYTES = 1 << 28


class DamagedClaimsError(ValueError):
    """Bytes that are no batch and no snapshot."""


def no_keys() -> Keys:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class ClaimChange:
    """Keys of chunks that have come to a tier, and that have left it."""

    device_stored: Keys = field(default_factory=no_keys)
    device_removed: Keys = field(default_factory=no_keys)
    host_stored: Keys = field(default_factory=no_keys)
    host_removed: Keys = field(default_factory=no_keys)

    def __len__(self) -> int:
        return sum(map(len, (self.device_stored, self.device_removed, self.host_stored, self.host_removed)))


@dataclass(frozen=True, slots=True, eq=False)
class ClaimBatch:
    """One change, the sequence-th of the worker's generation; the first is 1."""

    generation: int
    sequence: int
    change: ClaimChange


@dataclass(frozen=True, slots=True, eq=False)
class ClaimSnapshot:
    """All claims of a worker after batch `sequence` of its generation."""

    generation: int
    sequence: int
    device: Keys
    host: Keys


def encode_batch(batch: ClaimBatch) -> bytes:
    change = batch.change
    message = wire.ClaimBatch(
        generation=batch.generation,
        sequence=batch.sequence,
        device_stored=_bytes(change.device_stored),
        device_removed=_bytes(change.device_removed),
        host_stored=_bytes(change.host_stored),
        host_removed=_bytes(change.host_removed),
    )
    return _compressed(message.SerializeToString())


def decode_batch(data: bytes) -> ClaimBatch:
    """Raises DamagedClaimsError."""
    try:
        message = wire.ClaimBatch.FromString(_decompressed(data))
    except DecodeError as error:
        raise DamagedClaimsError(str(error)) from None
    change = ClaimChange(
        _keys(message.device_stored),
        _keys(message.device_removed),
        _keys(message.host_stored),
        _keys(message.host_removed),
    )
    return ClaimBatch(message.generation, message.sequence, change)


def encode_snapshot(snapshot: ClaimSnapshot) -> bytes:
    message = wire.ClaimSnapshot(
        generation=snapshot.generation,
        sequence=snapshot.sequence,
        device=_sorted_bytes(snapshot.device),
        host=_sorted_bytes(snapshot.host),
    )
    return _compressed(message.SerializeToString())


def decode_snapshot(data: bytes) -> ClaimSnapshot:
    """Raises DamagedClaimsError."""
    try:
        message = wire.ClaimSnapshot.FromString(_decompressed(data))
    except DecodeError as error:
        raise DamagedClaimsError(str(error)) from None
    return ClaimSnapshot(
        message.generation, message.sequence, _unsorted(_keys(message.device)), _unsorted(_keys(message.host))
    )


def _bytes(keys: Keys) -> bytes:
    return keys.astype(_KEY, copy=False).tobytes()


def _sorted_bytes(keys: Keys) -> bytes:
    """Differences of the sorted keys, byte plane by byte plane: the upper planes are nearly all zero."""
    steps = np.diff(np.sort(keys), prepend=np.uint64(0))
    return steps.astype(_KEY, copy=False).view(np.uint8).reshape(-1, _KEY.itemsize).T.tobytes()


def _unsorted(planes: Keys) -> Keys:
    steps = planes.view(np.uint8).reshape(_KEY.itemsize, -1).T.copy().view(_KEY).reshape(-1)
    keys: Keys = np.cumsum(steps, dtype=np.uint64)
    return keys


def _keys(data: bytes) -> Keys:
    if len(data) % _KEY.itemsize:
        raise DamagedClaimsError(f"{len(data)} bytes are no whole number of keys")
    return np.frombuffer(data, dtype=_KEY)


def _compressed(data: bytes) -> bytes:
    smaller = zlib.compress(data, _COMPRESSION_LEVEL)
    return _COMPRESSED + smaller if len(smaller) < len(data) else _RAW + data


def _decompressed(data: bytes) -> bytes:
    kind, body = data[:1], data[1:]
    if kind == _RAW:
        return body
    if kind != _COMPRESSED:
        raise DamagedClaimsError(f"unknown encoding {kind!r}")
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(body, _MOST_BYTES)
    except zlib.error as error:
        raise DamagedClaimsError(str(error)) from None
    if not inflater.eof:
        raise DamagedClaimsError(f"longer than {_MOST_BYTES} bytes, or cut off")
    return inflated
