"""Which worker a request goes to: filter, score, pick, in the shape of llm-d's scheduler plug-ins. Pure.

A policy has filters and weighted terms over columns with a row for each candidate. Every term lies in [0, 1], where 1
is best. The highest weighted sum wins; a seeded choice decides between equals, so that routers do not all choose alike.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from control_plane.fleet.candidates import Candidates
from control_plane.fleet.loads import Floats
from control_plane.model.worker_snapshot import WorkerSnapshot

# Scores that differ by less are equal.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A request, and what each candidate has of it; columns in tokens, one row for each candidate.

    device, host: of the prompt's beginning, what lies on the device (or is predicted to) and what follows it in host
    memory. shared: of the prompt, with what runs or waits there, as far as this router knows; sharers: with how many.
    excluded: (worker, generation) that have already failed the request. long_s: see `long_prompts`.
    """

    prompt_tokens: int
    max_tokens: int
    device: Floats
    host: Floats
    shared: Floats
    sharers: Floats
    excluded: frozenset[tuple[str, int]] = frozenset()
    long_s: float = math.inf

    @property
    def uncached(self) -> Floats:
        """Prompt tokens that would have to be computed; at least the last one always is."""
        return np.maximum(self.prompt_tokens - self.device - self.host, 1.0)


def asked(prompt_tokens: int, max_tokens: int, rows: int) -> Question:
    """A request of which nobody has anything."""
    device, host, shared, sharers = np.zeros((4, rows))
    return Question(prompt_tokens, max_tokens, device, host, shared, sharers)


Filter = Callable[[Question, Candidates], NDArray[np.bool_]]
Term = Callable[[Question, Candidates], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a policy made of one question. passed: who got through the filters. terms: by name, unweighted.

    winner: the row; -1 where nobody passed.
    """

    candidates: Candidates
    passed: NDArray[np.bool_]
    terms: dict[str, Floats]
    scores: Floats
    winner: int

    @property
    def worker(self) -> WorkerSnapshot | None:
        return self.candidates.workers[self.winner] if self.winner >= 0 else None


def not_excluded(question: Question, candidates: Candidates) -> NDArray[np.bool_]:
    """Workers that have not failed this request under this generation."""
    if not question.excluded:
        return np.ones(len(candidates), dtype=np.bool_)
    names = [(each.worker_id, each.generation) not in question.excluded for each in candidates.workers]
    return np.array(names, dtype=np.bool_)


@dataclass(frozen=True)
class PlacementPolicy:
    """terms: by name, each with its weight. Without terms all candidates are equal."""

    terms: tuple[tuple[str, Term, float], ...]
    filters: tuple[Filter, ...] = (not_excluded,)
    name: str = field(default="")

    @cached_property
    def weights(self) -> dict[str, float]:
        return {name: weight for name, _, weight in self.terms}

    def choose(self, question: Question, candidates: Candidates, choice: random.Random) -> Decision:
        """Never raises; a decision without a winner when no candidate passes."""
        passed = np.ones(len(candidates), dtype=np.bool_)
        for passes in self.filters:
            passed &= passes(question, candidates)
        terms: dict[str, Floats] = {}
        scores = np.zeros(len(candidates))
        if passed.any():
            for name, term, weight in self.terms:
                terms[name] = term(question, candidates)
                scores += weight * terms[name]
        return Decision(candidates, passed, terms, scores, _pick(scores, passed, choice))


def _pick(scores: Floats, passed: NDArray[np.bool_], choice: random.Random) -> int:
    rows = np.flatnonzero(passed)
    if not len(rows):
        return -1
    best = rows[scores[rows] >= scores[rows].max() - _EQUAL]
    return int(best[0] if len(best) == 1 else best[choice.randrange(len(best))])
