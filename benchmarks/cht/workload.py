"""Requests for `rachis bench cht`, made one by one as they arrive.

Each prompt begins with the prefix of its group, which is drawn at random, and ends with a tenth of its tokens that
nobody else has. No two requests share an object: like lists that come off the wire, they are equal by value only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from decode_worker import chunk_hashes
from decode_worker.chunk_hashes import ChunkHash

# Of vLLM, where its hashes are reused.
BLOCK_TOKENS = 32
_BLOCK_HASH_BYTES = 32
_VOCABULARY_SIZE = 128_000


@dataclass(frozen=True, slots=True)
class ChtWorkload:
    """What is inserted, found, added and finished."""

    requests: int = 5000
    # Of each prompt.
    tokens: int = 5000
    # Of requests that share a prefix.
    groups: int = 5
    chunk_tokens: int = 64
    # Calls of FIND for each request, on average.
    finds: float = 5.3
    seed: int = 0

    @property
    def own_tokens(self) -> int:
        return max(1, self.tokens // 10)

    @property
    def chunks(self) -> int:
        """Of a prompt."""
        return self.tokens // self.chunk_tokens

    @property
    def blocks_per_chunk(self) -> int:
        """A chunk of reused hashes is rounded up to whole blocks, as in the scheduler."""
        return -(-self.chunk_tokens // BLOCK_TOKENS)

    @property
    def reused_chunk_tokens(self) -> int:
        return self.blocks_per_chunk * BLOCK_TOKENS


# What arrives, and what makes chunk hashes of one of those.
Arrivals = tuple[Iterator[Any], Callable[[Any], Sequence[ChunkHash]]]


def computed(workload: ChtWorkload) -> Arrivals:
    """Token lists, which have to be hashed."""
    return token_lists(workload), partial(chunk_hashes.of_tokens, chunk_tokens=workload.chunk_tokens)


def reused(workload: ChtWorkload) -> Arrivals:
    """Hashes of blocks, as vLLM has them for its prefix cache."""
    return block_hash_lists(workload), partial(chunk_hashes.of_blocks, blocks_per_chunk=workload.blocks_per_chunk)


def token_lists(workload: ChtWorkload) -> Iterator[list[int]]:
    """Without end."""
    rng = np.random.default_rng(workload.seed)
    own = workload.own_tokens
    prefixes = rng.integers(_VOCABULARY_SIZE, size=(workload.groups, workload.tokens - own))
    while True:
        group = rng.integers(workload.groups)
        yield np.concatenate((prefixes[group], rng.integers(_VOCABULARY_SIZE, size=own))).tolist()


def block_hash_lists(workload: ChtWorkload) -> Iterator[list[bytes]]:
    """Without end. Full blocks only; the one in which a prefix ends is the request's own."""
    rng = np.random.default_rng(workload.seed)
    blocks = workload.tokens // BLOCK_TOKENS
    shared_blocks = (workload.tokens - workload.own_tokens) // BLOCK_TOKENS
    prefixes = [rng.bytes(shared_blocks * _BLOCK_HASH_BYTES) for _ in range(workload.groups)]
    while True:
        hashes = prefixes[rng.integers(workload.groups)] + rng.bytes((blocks - shared_blocks) * _BLOCK_HASH_BYTES)
        yield [hashes[at : at + _BLOCK_HASH_BYTES] for at in range(0, len(hashes), _BLOCK_HASH_BYTES)]
