"""Requests on their way through a hash tree, timed operation by operation.

As in FEATHER section 5.3.4 each is inserted, found several times, added to the batch and finished. Whenever the batch,
which carries over, is full, one of it drawn at random finishes and the best one joins. INSERT contains what it takes to
get chunk hashes. Times are of the wall clock, whose own 0.1 us is in them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.cht.workload import Arrivals, ChtWorkload
from cluster_core.clock import monotonic_s
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.chunked_hash_tree import Candidate

OPERATIONS = ("insert", "find", "add", "finish")
BATCH_REQUESTS = 64


class HashTree(Protocol):
    """What both trees offer."""

    def insert(self, request_id: str, hashes: Sequence[ChunkHash], /) -> None: ...

    def find_best(self) -> Candidate | None: ...

    def add_to_batch(self, request_id: str, /) -> None: ...

    def finish(self, request_id: str, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Mean cost of each operation of a request."""

    insert_ns: float
    find_ns: float
    add_ns: float
    finish_ns: float
    # Calls of FIND for each request.
    finds: float
    # Of a single operation, or of a few finds.
    longest_ms: float = 0.0

    @property
    def per_request_us(self) -> float:
        return (self.insert_ns + self.finds * self.find_ns + self.add_ns + self.finish_ns) / 1e3

    @property
    def per_decision_us(self) -> float:
        """One finishes, the next is found and joins."""
        return (self.find_ns + self.add_ns + self.finish_ns) / 1e3

    def figures(self) -> dict[str, float]:
        by_operation = {f"{name}_ns": round(getattr(self, f"{name}_ns")) for name in OPERATIONS}
        return {**by_operation, "per_request_us": round(self.per_request_us, 2)}


def best_of(costs: Sequence[Costs]) -> Costs:
    """Operation by operation."""
    least = {f"{name}_ns": min(getattr(each, f"{name}_ns") for each in costs) for name in OPERATIONS}
    return Costs(**least, finds=costs[0].finds, longest_ms=min(each.longest_ms for each in costs))


class Play:
    """Requests on their way through a tree, and the time that each operation took."""

    def __init__(
        self,
        tree: HashTree,
        arrivals: Arrivals,
        workload: ChtWorkload,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._tree = tree
        self._arrivals, self._hashes = arrivals
        self._finds = workload.finds
        self._now_s = now_s
        self._finds_due = 0.0
        self._rng = random.Random(workload.seed)
        self._batch: list[str] = []
        self._inserted = 0
        self.forget_times()

    def forget_times(self) -> None:
        self._spent_s = dict.fromkeys(OPERATIONS, 0.0)
        self._calls = dict.fromkeys(OPERATIONS, 0)
        self._longest_s = 0.0

    def insert(self) -> None:
        arrived, name = next(self._arrivals), f"r{self._inserted}"
        self._inserted += 1
        began_s = self._now_s()
        self._tree.insert(name, self._hashes(arrived))
        self._spent("insert", self._now_s() - began_s)

    def admit(self) -> None:
        """The best one joins a batch that has room for it. It is asked for before, and again afterwards."""
        if len(self._batch) == BATCH_REQUESTS:
            self.finish()
        self._finds_due += self._finds
        finds = int(self._finds_due)
        self._finds_due -= finds
        best = self._find((finds + 1) // 2)
        assert best is not None, "nobody waits"
        began_s = self._now_s()
        self._tree.add_to_batch(best.request_id)
        self._spent("add", self._now_s() - began_s)
        self._batch.append(best.request_id)
        if finds > 1:
            self._find(finds // 2)

    def finish(self) -> None:
        index = self._rng.randrange(len(self._batch))
        self._batch[index], self._batch[-1] = self._batch[-1], self._batch[index]
        name = self._batch.pop()
        began_s = self._now_s()
        self._tree.finish(name)
        self._spent("finish", self._now_s() - began_s)

    def finish_all(self) -> None:
        while self._batch:
            self.finish()

    def costs(self) -> Costs:
        means = {f"{name}_ns": 1e9 * self._spent_s[name] / self._calls[name] for name in OPERATIONS}
        return Costs(**means, finds=self._finds, longest_ms=1e3 * self._longest_s)

    def _find(self, times: int) -> Candidate | None:
        find_best = self._tree.find_best
        began_s = self._now_s()
        for _ in range(times - 1):
            find_best()
        best = find_best()
        self._spent("find", self._now_s() - began_s, times)
        return best

    def _spent(self, operation: str, took_s: float, calls: int = 1) -> None:
        self._spent_s[operation] += took_s
        self._calls[operation] += calls
        self._longest_s = max(self._longest_s, took_s)


def play_all(
    tree: HashTree, arrivals: Arrivals, workload: ChtWorkload, now_s: Callable[[], float] = monotonic_s
) -> Costs:
    """All arrive, then one after the other joins and finishes."""
    play = Play(tree, arrivals, workload, now_s)
    for _ in range(workload.requests):
        play.insert()
    for _ in range(workload.requests):
        play.admit()
    play.finish_all()
    return play.costs()
