"""Which worker a request goes to: filter, score, pick, in the shape of llm-d's scheduler plug-ins. Pure.

A policy has weighted terms over columns with a row for each candidate. Every term lies in [0, 1], where 1
is best. The highest weighted sum wins; a seeded choice decides between equals, so that routers do not all choose alike.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from control_plane.fleet.loads import Floats
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.placement.view import PoolView

# Scores that differ by less are equal.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks of a pool. excluded: (worker, generation) that have already failed the request. avoided:
    those that may do so as well, taken where there is no other."""

    prompt_tokens: int
    max_tokens: int
    excluded: frozenset[tuple[str, int]] = frozenset()
    # An engine died while it worked on the request: it goes where it harms nobody else, if there is such a worker.
    alone: bool = False
    avoided: frozenset[tuple[str, int]] = frozenset()
    # Digest; empty: the model alone.
    adapter: str = ""
    # Engines serve others first.
    best_effort: bool = False
    # Its prompt still comes.
    arriving: bool = False


Filter = Callable[[Question, PoolView], NDArray[np.bool_]]
Term = Callable[[Question, PoolView], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a policy made of one question."""

    view: PoolView
    # The candidates that got through the filters.
    passed: NDArray[np.bool_]
    # By name, unweighted.
    terms: dict[str, Floats]
    scores: Floats
    # The row; -1 where no candidate passed.
    winner: int

    @property
    def worker(self) -> WorkerSnapshot | None:
        return self.view.candidates.workers[self.winner] if self.winner >= 0 else None


def not_excluded(question: Question, view: PoolView) -> NDArray[np.bool_]:
    """Workers that have not failed this request under this generation."""
    return _none_of(question.excluded, view)


def not_doubtful(question: Question, view: PoolView) -> NDArray[np.bool_]:
    """Workers of which nothing speaks against a second try."""
    return _none_of(question.avoided, view)


def harms_nobody(question: Question, view: PoolView) -> NDArray[np.bool_]:
    """Of a request that goes alone, workers without any other request of this router.

    A refusal would hit the many that were merely there when an engine died.
    """
    in_flight = view.candidates.in_flight_requests
    return in_flight == 0 if question.alone else np.ones(len(in_flight), dtype=np.bool_)


def _none_of(named: frozenset[tuple[str, int]], view: PoolView) -> NDArray[np.bool_]:
    workers = view.candidates.workers
    if not named:
        return np.ones(len(workers), dtype=np.bool_)
    return np.array([(each.worker_id, each.generation) not in named for each in workers], dtype=np.bool_)


# As far as anybody is left, the weightiest first.
_PREFERENCES: tuple[Filter, ...] = (not_doubtful, harms_nobody)


def passing(question: Question, view: PoolView) -> NDArray[np.bool_]:
    """Those that may get the request, and of them those that are better asked."""
    passed = not_excluded(question, view)
    for prefers in _PREFERENCES:
        preferred = passed & prefers(question, view)
        if preferred.any():
            passed = preferred
    return passed


@dataclass(frozen=True)
class PlacementPolicy:
    """terms: by name, each with its weight. Without terms all candidates are equal."""

    terms: tuple[tuple[str, Term, float], ...]
    name: str = field(default="")

    @cached_property
    def weights(self) -> dict[str, float]:
        return {name: weight for name, _, weight in self.terms}

    def choose(self, question: Question, view: PoolView, rng: random.Random) -> Decision:
        """Never raises; a decision without a winner when no candidate passes. Draws from `rng` between equals only."""
        passed = passing(question, view)
        terms: dict[str, Floats] = {}
        scores = np.zeros(len(view.candidates))
        if passed.any():
            with np.errstate(all="ignore"):
                for name, term, weight in self.terms:
                    told = term(question, view)
                    # Of figures beyond all measure a term is no number, which is as bad as can be.
                    terms[name] = np.where(np.isfinite(told), told, 0.0)
                    scores += weight * terms[name]
        return Decision(view, passed, terms, scores, _pick(scores, passed, rng))


def _pick(scores: Floats, passed: NDArray[np.bool_], rng: random.Random) -> int:
    rows = np.flatnonzero(passed)
    if not len(rows):
        return -1
    best = rows[scores[rows] >= scores[rows].max() - _EQUAL]
    return int(best[0] if len(best) == 1 else best[rng.randrange(len(best))])
