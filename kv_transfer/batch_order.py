"""Which rows of a batch change places so that requests that share a prefix lie side by side.

Attention reads the KV of one row after the other: what the row before has read lies in the cache still. On a CPU that
alone makes a decode step of mixed prefixes up to 1.6 times as fast (benchmarks/results/decode-locality-cpu.json).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# A prefix of blocks, as far as another row has it too.
Key = tuple[int, ...]


def shared_keys(blocks: NDArray[np.int32], lengths: Sequence[int]) -> list[Key]:
    """For each row of a block table the ids of blocks 0, 1, 3, 7, ... as far as another row has the same.

    blocks: (rows, most blocks); lengths: how many blocks of each row count. A block that two rows have they have at the
    same place, and all before it too.
    """
    rows = range(len(lengths))
    keys: list[Key] = [()] * len(lengths)
    sharing = list(rows)
    column = 0
    while len(sharing) > 1 and column < blocks.shape[1]:
        ids = dict(zip(sharing, blocks[sharing, column].tolist(), strict=True))
        often = Counter(ids[row] for row in sharing if lengths[row] > column)
        sharing = [row for row in sharing if lengths[row] > column and often[ids[row]] > 1]
        for row in sharing:
            keys[row] += (ids[row],)
        column = 2 * column + 1
    return keys


def swaps_to_group(keys: Sequence[Key]) -> Iterator[tuple[int, int]]:
    """Pairs of places that change rows, one after the other, until equal keys lie together, in the order of the keys.

    Each puts a row into the span of its key: as few as rows lie outside theirs, at most.
    """
    held = list(keys)
    wanted = sorted(held)
    # Of each key the places of its span that hold another one.
    open_places: dict[Key, list[int]] = {}
    for place in reversed(range(len(held))):
        if held[place] != wanted[place]:
            open_places.setdefault(wanted[place], []).append(place)
    for place, key in enumerate(wanted):
        if held[place] != key:
            open_places[key].pop()
        while held[place] != key:
            other = open_places[held[place]].pop()
            held[place], held[other] = held[other], held[place]
            yield place, other
