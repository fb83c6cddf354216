"""The chunked hash tree as FEATHER publishes it (Algorithms 3 to 6), with its mistakes corrected: sets and counts.

The reference that `decode_worker.chunked_hash_tree` is tested against and measured beside. Corrected, by line of the
paper: Alg. 4 line 7 skips a request that is active; Alg. 5 fills counts and working set for the first request as well,
decrements the missing counts, and looks for the tip before it inserts; Alg. 6 always cleans up. Besides: a preempted
request comes back, priorities go first, ties are broken by arrival, and peers are the others.
"""

import heapq
from collections.abc import Hashable, Sequence

from decode_worker.chunked_hash_tree import Candidate

# (level, hash): as published.
_Chunk = tuple[int, Hashable]


class PublishedHashTree:
    """The interface is that of `ChunkedHashTree`, as far as the algorithms go."""

    def __init__(self) -> None:
        self._hashes: dict[str, list[_Chunk]] = {}
        self._turn: dict[str, tuple[int, int]] = {}
        self._missing: dict[str, int] = {}
        self._waiting: dict[_Chunk, set[str]] = {}
        self._references: dict[_Chunk, int] = {}
        self._active: dict[str, None] = {}
        self._heap: list[tuple[int, int, int, str]] = []
        self._tip: tuple[int, _Chunk | None] = (0, None)
        self._arrivals = 0
        self._best: Candidate | None = None

    def insert(self, request_id: str, hashes: Sequence[Hashable], priority: int = 0) -> None:
        if request_id in self._hashes:
            raise ValueError(request_id)
        self._hashes[request_id] = list(enumerate(hashes, 1))
        self._turn[request_id] = (priority, self._arrivals)
        self._arrivals += 1
        self._wait(request_id)

    def find_best(self) -> Candidate | None:
        if self._best is not None:
            return self._best
        while self._heap:
            _, missing, _, request_id = self._heap[0]
            if self._missing.get(request_id) != missing:
                heapq.heappop(self._heap)
                continue
            chunks = self._hashes[request_id]
            before = self._tip[0]
            limit = min(before, len(chunks)) if self._active else len(chunks)
            after = limit
            while self._active and after and chunks[after - 1] not in self._references:
                after -= 1
            sharing = self._waiting[chunks[after - 1]] if after else self._missing.keys()
            self._best = Candidate(request_id, missing, before, after, len(sharing) - 1)
            return self._best
        return None

    def add_to_batch(self, request_id: str) -> None:
        chunks = self._hashes[request_id]
        self._stop_waiting(request_id)
        limit = min(self._tip[0], len(chunks)) if self._active else len(chunks)
        first = not self._active
        self._active[request_id] = None
        tip: tuple[int, _Chunk | None] = (0, None)
        for chunk in reversed(chunks):
            if not tip[0] and chunk[0] <= limit and (first or chunk in self._references):
                tip = (chunk[0], chunk)
            if chunk not in self._references:
                self._change_missing(chunk, -1)
            self._references[chunk] = self._references.get(chunk, 0) + 1
        self._tip = tip

    def preempt(self, request_id: str) -> None:
        self._deactivate(request_id)
        self._wait(request_id)

    def finish(self, request_id: str) -> None:
        self._deactivate(request_id)
        self._forget(request_id)

    def remove(self, request_id: str) -> None:
        self._stop_waiting(request_id)
        self._forget(request_id)

    @property
    def tip_chunks(self) -> int:
        return self._tip[0]

    @property
    def working_set_chunks(self) -> int:
        return len(self._references)

    def missing_chunks(self, request_id: str) -> int:
        return self._missing[request_id]

    def _deactivate(self, request_id: str) -> None:
        del self._active[request_id]
        self._best = None
        for chunk in self._hashes[request_id]:
            self._references[chunk] -= 1
            if not self._references[chunk]:
                del self._references[chunk]
                self._change_missing(chunk, 1)
        depth, chunk_at = self._tip
        if not self._active:
            depth, chunk_at = 0, None
        else:
            anyone = self._hashes[next(iter(self._active))]
            while depth < len(anyone) and self._references[anyone[depth]] == len(self._active):
                chunk_at = anyone[depth]
                depth += 1
        self._tip = (depth, chunk_at)

    def _wait(self, request_id: str) -> None:
        self._best = None
        chunks = self._hashes[request_id]
        for chunk in chunks:
            self._waiting.setdefault(chunk, set()).add(request_id)
        self._missing[request_id] = sum(chunk not in self._references for chunk in chunks)
        self._push(request_id)

    def _stop_waiting(self, request_id: str) -> None:
        self._best = None
        del self._missing[request_id]
        for chunk in self._hashes[request_id]:
            self._waiting[chunk].discard(request_id)
            if not self._waiting[chunk]:
                del self._waiting[chunk]

    def _change_missing(self, chunk: _Chunk, change: int) -> None:
        for request_id in self._waiting.get(chunk, ()):
            self._missing[request_id] += change
            self._push(request_id)

    def _push(self, request_id: str) -> None:
        priority, arrival = self._turn[request_id]
        heapq.heappush(self._heap, (priority, self._missing[request_id], arrival, request_id))

    def _forget(self, request_id: str) -> None:
        del self._hashes[request_id], self._turn[request_id]
