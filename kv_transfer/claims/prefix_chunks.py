"""Names of prefixes, the same in every process: a prompt cut into chunks, each with a key that covers all before it.

key of chunk i = XXH3-64(token ids of chunk i, little-endian uint32; seed = key of chunk i - 1). The first seed is the
tenant's root: a keyed BLAKE2b of `cache_salt` and adapter under the service's id, so nobody who does not know both can
name another tenant's chunks, and equal prompts of two tenants have nothing in common. Keys have 64 bits and are no
proof: two prefixes with one key cost a misplaced request, never a token, because engines compare their own hashes.

Sources: XXH3 (github Cyan4973/xxHash, doc/xxhash_spec.md), BLAKE2 (RFC 7693).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
TokenIds = Sequence[int] | NDArray[np.uint32]

# The table of the index marks a free place by it.
NO_KEY = 0
_TOKEN_BYTES = 4
_TOKEN = np.dtype("<u4")
_hash = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True, eq=False)
class PackedPrompt:
    """A prompt's tokens as uint32, and the keys of its full chunks."""

    token_ids: NDArray[np.uint32]
    keys: Keys


def root_key(service_id: str, cache_salt: str, adapter: str = "") -> int:
    """What the first chunk's key of a tenant starts from."""
    digest = hashlib.blake2b(digest_size=8, key=hashlib.sha256(service_id.encode()).digest(), person=b"rachis-prefix")
    for part in (cache_salt, adapter):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")


def next_key(key: int, token_ids: TokenIds) -> int:
    """The key of the chunk of these tokens that follows the one of that key, or the root."""
    return _hash(_packed(token_ids), key) or 1


def chunk_keys(token_ids: TokenIds, root: int, chunk_tokens: int) -> Keys:
    """Keys of the full chunks of a prompt, in order; a shorter rest has none. A uint32 array is fastest."""
    packed = memoryview(_packed(token_ids))
    chunk_bytes = chunk_tokens * _TOKEN_BYTES
    key = root
    keys = [
        key := _hash(packed[start : start + chunk_bytes], key) or 1
        for start in range(0, len(packed) - chunk_bytes + 1, chunk_bytes)
    ]
    return np.array(keys, dtype=np.uint64)


def short_name(key: int) -> str:
    """The beginning of a key, for people."""
    return f"{key:016x}"[:8]


def _packed(token_ids: TokenIds) -> bytes:
    return np.asarray(token_ids, dtype=_TOKEN).tobytes()
