"""Cumulative hashes of a prompt at chunk ends: hash i covers all tokens up to the end of chunk i.

Two prompts have the same hash i exactly when they share that prefix. Only full chunks have one: no request shares
what comes after the last. Source: FEATHER section 4.2.1 and Algorithm 1 (which hashes the rest as well).
"""

from array import array
from collections.abc import Sequence

import xxhash

ChunkHash = bytes | int


def of_tokens(token_ids: Sequence[int], chunk_tokens: int) -> list[int]:
    """XXH3-64 over the tokens as 32-bit numbers, one pass. An `array("I")` is taken as it is."""
    packed = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    view = memoryview(packed).cast("B")
    width = chunk_tokens * packed.itemsize
    state = xxhash.xxh3_64()
    hashes = []
    for start in range(0, len(view) - width + 1, width):
        state.update(view[start : start + width])
        hashes.append(state.intdigest())
    return hashes


def of_blocks(block_hashes: Sequence[bytes], blocks_per_chunk: int) -> list[bytes]:
    """From the hashes that vLLM has for the prefix cache: cumulative already, and different for another salt."""
    return list(block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk])


def common_chunks(one: Sequence[ChunkHash], other: Sequence[ChunkHash]) -> int:
    """How many chunks two prompts share."""
    most = min(len(one), len(other))
    return common_chunks_within(one, other, 1, most) if most and one[0] == other[0] else 0


def common_chunks_within(one: Sequence[ChunkHash], other: Sequence[ChunkHash], least: int, most: int) -> int:
    """How many chunks two prompts share, which is known to lie in [least, most]."""
    if one[most - 1] == other[most - 1]:
        return most
    while least < most - 1:
        middle = (least + most) // 2
        if one[middle - 1] == other[middle - 1]:
            least = middle
        else:
            most = middle
    return least
