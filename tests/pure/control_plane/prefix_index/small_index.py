"""Small numbers as keys of chunks, an index with a few workers, and what it matches for one of them."""

import numpy as np

from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys

HALF_LIFE_S = 100.0
WORKERS = ("a", "b", "c")


def keys(*numbers: int) -> Keys:
    """Small numbers as keys that spread over the table."""
    return np.array([number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers], dtype=np.uint64)


def index(entries: int = 10_000, workers: tuple[str, ...] = WORKERS) -> PrefixIndex:
    made = PrefixIndex(entries, HALF_LIFE_S)
    for worker in workers:
        made.join(worker, 1)
    return made


def device(*numbers: int) -> ClaimChange:
    return ClaimChange(device_stored=keys(*numbers))


def matched(found: PrefixIndex, worker: str, prompt: Keys) -> tuple[int, int, int]:
    """Chunks on the device, warm, and held."""
    matches = found.lookup(prompt)
    slot = found.slot(worker, found.generation(worker))
    return int(matches.device[slot]), int(matches.warm[slot]), int(matches.held[slot])
