"""Which prefixes run or wait on which worker, of the requests that this router has sent there.

A prompt is marked at some depths only, about 1.4 times apart, so that a request costs a dozen entries however long it
is; what two prompts share is found to the depth below it. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.claims.prefix_chunks import Keys

MARKS = tuple(sorted({*(1 << power for power in range(24)), *(3 << power for power in range(23))}))


@dataclass(frozen=True, slots=True)
class Shared:
    """What a prompt has in common with requests on one worker."""

    # Of the prompt, from its beginning.
    chunks: int
    # How many share them.
    requests: int


class RunningPrefixes:
    """`add` and `remove` come in pairs with the same arguments."""

    def __init__(self) -> None:
        self._by_key: dict[int, dict[str, int]] = {}
        # By worker, the chunks that more than one of its requests has, as often as they do but for the first time.
        self.repeated: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, worker_id: str, keys: Keys) -> None:
        above = 0
        for chunks, key in _marks(keys):
            workers = self._by_key.setdefault(key, {})
            workers[worker_id] = requests = workers.get(worker_id, 0) + 1
            if requests > 1:
                self.repeated[worker_id] = self.repeated.get(worker_id, 0) + chunks - above
            above = chunks

    def remove(self, worker_id: str, keys: Keys) -> None:
        above = 0
        for chunks, key in _marks(keys):
            workers = self._by_key[key]
            workers[worker_id] -= 1
            if workers[worker_id]:
                self.repeated[worker_id] -= chunks - above
                if not self.repeated[worker_id]:
                    del self.repeated[worker_id]
            else:
                del workers[worker_id]
            above = chunks
            if not workers:
                del self._by_key[key]

    def shared(self, keys: Keys) -> dict[str, Shared]:
        """By worker, the most of this prompt that requests there share. O(log(prompt) * workers that share)."""
        found: dict[str, Shared] = {}
        for chunks, key in _marks(keys):
            workers = self._by_key.get(key)
            if workers is None:
                break
            for worker_id, requests in workers.items():
                found[worker_id] = Shared(chunks, requests)
        return found


def _marks(keys: Keys) -> Iterator[tuple[int, int]]:
    """Depths in chunks, and the keys there."""
    for chunks in MARKS:
        if chunks > len(keys):
            return
        yield chunks, int(keys[chunks - 1])
