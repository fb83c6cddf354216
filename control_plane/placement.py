"""Which worker a request goes to: filter, score, pick, in the shape of llm-d's scheduler plug-ins.

A policy is a list of filters and weighted scorers over snapshots; scores lie in [0, 1]. The prefix-hotness index
will add scorers to the same lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from control_plane.membership import WorkerSnapshot


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement knows of a request. excluded: (worker, generation) that have already failed it."""

    token_ids: Sequence[int]
    max_tokens: int
    excluded: frozenset[tuple[str, int]] = frozenset()


Filter = Callable[[PlacementRequest, WorkerSnapshot], bool]
Scorer = Callable[[PlacementRequest, WorkerSnapshot], float]


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Pick the candidate with the highest weighted score; ties go to the first by name."""

    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]

    def choose(self, request: PlacementRequest, candidates: Sequence[WorkerSnapshot]) -> WorkerSnapshot | None:
        """None when no candidate passes the filters."""
        passing = [worker for worker in candidates if all(passes(request, worker) for passes in self.filters)]
        if not passing:
            return None
        ordered = sorted(passing, key=lambda worker: worker.worker_id)
        return max(ordered, key=lambda worker: sum(weight * score(request, worker) for score, weight in self.scorers))


def not_excluded(request: PlacementRequest, worker: WorkerSnapshot) -> bool:
    return (worker.worker_id, worker.generation) not in request.excluded


def load_score(_request: PlacementRequest, worker: WorkerSnapshot) -> float:
    """1 for an idle worker, falling with the tokens it has in flight; requests count as some tokens each."""
    return 1.0 / (1.0 + worker.in_flight_tokens + 16 * worker.in_flight_requests)


LEAST_LOADED = PlacementPolicy(filters=(not_excluded,), scorers=((load_score, 1.0),))
