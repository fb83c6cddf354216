"""Placement for a service whose workers all do both, by the objectives: the shell of `by_objective`.

It answers a journey as `Placer` does, which it is but for its choices: a request that is to be prefilled and decoded by
one worker has no prefill worker, one that is prefilled apart gets its decode worker at its first token. A request that
no choice keeps TTFT for is refused, and counted; one whose answer has begun is not.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from control_plane.fleet.loads import Work
from control_plane.model.job import Job
from control_plane.model.worker_snapshot import Pool
from control_plane.placement import by_objective
from control_plane.placement.both_view import DecodeCosts, both_view
from control_plane.placement.by_objective import BothView, Choice, Objectives, Refusal, Way
from control_plane.placement.flight import Placement
from control_plane.placement.placer import Placer, question_of

_EXCLUDED: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class BothRules:
    """prefill_heavy: share of the workers, none where it is 0. refuses: what cannot keep TTFT."""

    objectives: Objectives
    costs: DecodeCosts
    prefill_heavy: float = 0.25
    refuses: bool = True


@dataclass(slots=True)
class BothCounts:
    """What was decided so far. bound_elsewhere: of the requests prefilled apart, those decoded by another worker."""

    ways: Counter[Way] = field(default_factory=Counter)
    refused: int = 0
    bound: int = 0
    bound_elsewhere: int = 0


class ObjectivePlacer(Placer):
    """Of workers in the decode pool, which do both."""

    def __init__(self, both: BothRules, *of_placer: Any, **named: Any) -> None:
        super().__init__(*of_placer, **named)
        self.both = both
        self.decided = BothCounts()

    def route(self, job: Job, *, is_whole: bool) -> Placement | None:
        """Raises OverloadedError where no choice keeps TTFT."""
        view = self._view(job, _EXCLUDED)
        begins = not job.emitted and is_whole
        choice = by_objective.decide(view, self.both.objectives, refuses=self.both.refuses and begins)
        if isinstance(choice, Refusal):
            self.decided.refused += 1
            raise OverloadedError(
                f"no worker is expected to have the first token within {self.both.objectives.ttft_s:g} s",
                retry_after_ms=round(choice.retry_after_s * 1000) + 1,
            )
        if choice is None:
            return None
        self.decided.ways[choice.way] += 1
        return self._placement(job, view, choice.row, Way.APART) if choice.way is Way.APART else None

    def place(
        self,
        job: Job,
        pool: Pool,
        excluded: frozenset[tuple[str, int]] = frozenset(),
        *,
        avoided: frozenset[tuple[str, int]] = frozenset(),
        prefills: bool = False,
    ) -> Placement | None:
        """prefills: prompt and answer are computed by one worker."""
        view = self._view(job, excluded)
        if pool == wire.POOL_DECODE and not prefills:
            source = job.route.prefill_worker_id
            row = by_objective.bind(view, self.both.objectives, source)
            if row < 0:
                return None
            self.decided.bound += 1
            self.decided.bound_elsewhere += view.workers[row].worker_id != source
            return Placement(view.workers[row], _decoded(job), self._prompt(job), job.scope)
        apart = pool == wire.POOL_PREFILL
        best = next((each for each in self._choices(view) if (each.way is Way.APART) == apart), None)
        return None if best is None else self._placement(job, view, best.row, best.way)

    def weighed(self, job: Job) -> list[Choice]:
        """All choices for a request, best first: what each was expected to cost. Changes nothing."""
        return self._choices(self._view(job, _EXCLUDED))

    def _choices(self, view: BothView) -> list[Choice]:
        return by_objective.choices(view, self.both.objectives)

    def _view(self, job: Job, excluded: frozenset[tuple[str, int]]) -> BothView:
        pool = self._current_views(self._prompt(job).keys, [wire.POOL_DECODE])[wire.POOL_DECODE]
        heavy = int(np.ceil(self.both.prefill_heavy * len(pool.candidates)))
        return both_view(pool, question_of(job, excluded), self.both.costs, self.both.objectives, heavy)

    def _placement(self, job: Job, view: BothView, row: int, way: Way) -> Placement:
        prompt_tokens = len(job.token_ids)
        uncomputed = round(max(prompt_tokens - float(view.cached_tokens[row]), 1.0))
        apart = way is Way.APART
        work = Work(
            prompt_tokens if apart else job.tokens,
            uncomputed,
            float(view.own_s[row]),
            arriving=apart and job.prompt_changes,
            answer_tokens=0 if apart else job.max_tokens,
            decodes=not apart,
        )
        return Placement(view.workers[row], work, self._prompt(job), job.scope)


def _decoded(job: Job) -> Work:
    return Work(job.tokens, answer_tokens=job.max_tokens)
