"""Placement for a service whose workers all do both, by the objectives: the shell of `by_objective`.

It answers a journey as `Placer` does, which it is but for its choices: a request that is to be prefilled and decoded by
one worker has no prefill worker; one that is prefilled apart, as every session is whose prompt still arrives, gets its
decode worker at its first token. A request that no choice is in time for is refused, and counted, unless anything of it
is answered. It is not refused for prompts that engines compute after it: see `fleet.tenant_lines`.
"""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from cluster_core.objectives import RequestClass, class_of, is_best_effort
from cluster_core.tenant_shares import Claimant
from control_plane.fleet.candidates import Candidates
from control_plane.fleet.loads import Floats, Work
from control_plane.model.job import Job
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement import by_objective
from control_plane.placement.answer_lengths import AnswerLengths
from control_plane.placement.both_view import DecodeCosts, both_view, to_try
from control_plane.placement.by_objective import BothView, Choice, Objectives, Refusal, Way
from control_plane.placement.decision_log import Explanation
from control_plane.placement.flight import Placement
from control_plane.placement.placer import Placer, question_of
from control_plane.placement.policy import Question
from control_plane.placement.return_times import ReturnTimes
from control_plane.placement.roles import Decodes, Roles, ToldRoles
from control_plane.placement.session_work import SessionWork
from control_plane.placement.view import PoolView
from kv_transfer.claims.prefix_chunks import Keys, PackedPrompt

OBJECTIVES = "objectives"
# Outcomes of requests that no choice keeps TTFT for, or TPOT.
REFUSED, REFUSED_FOR_TPOT = "refused", "refused_for_tpot"
_NOBODY: frozenset[tuple[str, int]] = frozenset()
# A worker that says that it is slow is tried so seldom.
_TRY_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class BothRules:
    """objectives: of those that are not best effort. costs: of steps that decode; None: as each worker has measured
    them. prefill_heavy: share of the workers; None: as many as what is asked for needs. refuses: what cannot keep TTFT.
    best_effort_ttft_s: None: that of the others. choices: all that there are for a request, best first.
    bounds_are_exact: answers become as long as they may, as in a simulation.
    least_tokens, step_tokens: of prompts, that engines compute in any step at least and at most."""

    objectives: Objectives
    costs: DecodeCosts | None = None
    prefill_heavy: float | None = None
    refuses: bool = True
    best_effort_ttft_s: float | None = None
    choices: Callable[[BothView, Objectives], list[Choice]] = by_objective.choices
    bounds_are_exact: bool = False
    least_tokens: int = 16
    step_tokens: int = 8192

    def objectives_of(self, *, best_effort: bool) -> Objectives:
        """A step is of all who decode in it, so that its bound is the same for both."""
        if not best_effort or self.best_effort_ttft_s is None:
            return self.objectives
        return replace(self.objectives, ttft_s=self.best_effort_ttft_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Asks:
    """A request, and the workers as it finds them. whose: None for one that is only supposed."""

    question: Question
    pool: PoolView
    whose: Claimant | None = None
    weight: float = 1.0


class ObjectivePlacer(Placer):
    """Of workers that do both, which the decode pool has or which are a pool of their own."""

    def __init__(self, both: BothRules, *of_placer: Any, **named: Any) -> None:
        super().__init__(*of_placer, **named)
        self.both = both
        self.roles = Roles(both.prefill_heavy)
        self.answers = AnswerLengths(bounds_are_exact=both.bounds_are_exact)
        self._returns = ReturnTimes()
        # Workers that were to be late with what they got, and when; those that say that they are slow among them.
        self._tried: dict[str, float] = {}

    def route(self, job: Job, *, is_whole: bool) -> Placement | None:
        """Raises OverloadedError where no choice is in time."""
        asks = self._asks(job, self._question(job))
        view = self._both_view(asks)
        # What still arrives is prefilled meanwhile, not where it decodes once it is whole.
        ways = tuple(Way) if is_whole else (Way.APART,)
        # Where hits are not known forecasts are too long.
        begins = is_whole and job.may_be_refused and not job.emitted and not asks.pool.is_stale
        choice, found = self._decided(asks, view, ways, refuses=self.both.refuses and begins)
        where = choice.worker.worker_id if isinstance(choice, Choice) and choice.way is Way.APART else ""
        self.log.weighed(job.request_id, job.tenant, _outcome(choice), found, where)
        if isinstance(choice, Refusal):
            asked = class_of(job.priority)
            self.counts.refused[asked] += 1
            raise OverloadedError(
                self._says_why(choice, asked),
                retry_after_ms=round(self._told_s(asks, choice, found) * 1000) + 1,
            )
        if choice is None:
            return None
        self.counts.ways[choice.way] += 1
        return self._taken(job, view, choice) if choice.way is Way.APART else None

    def answered(self, job: Job, tokens: int) -> None:
        self.answers.ended(job.max_tokens, tokens)

    def keep(self, job: Job) -> None:
        arrived = job.prompt_changes
        super().keep(job)
        # How much it would be nobody knew while it came. What has lost its worker counts where it is placed again.
        if arrived and job.prefilled_by:
            work = SessionWork().became_whole(len(job.token_ids), job.cached_tokens)
            workers = self._membership.candidates(wire.POOL_DECODE, self._now_s())
            self.roles.prompt(work.usual_s(workers.fixed), self._now_s())

    def told_roles(self) -> ToldRoles:
        self._look_at_roles()
        return ToldRoles(self.roles.prompts(self._now_s()), self.prefill_heavy())

    def prefill_heavy(self) -> int:
        return len(self._heavy_of(self._membership.usable(wire.POOL_DECODE)))

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
        asks = self._asks(job, self._question(job, excluded, avoided))
        view = self._both_view(asks)
        if pool == wire.POOL_DECODE and not prefills:
            return self._bound(job, view)
        ways = (Way.APART,) if pool == wire.POOL_PREFILL else (Way.WHOLE, Way.APPEND)
        choice, _ = self._decided(asks, view, ways, refuses=self.both.refuses)
        best = choice.best if isinstance(choice, Refusal) else choice
        if best is None:
            return None
        self.log.taken(job.request_id, job.tenant, best)
        return self._taken(job, view, best)

    def supposed(
        self, prompt: PackedPrompt, max_tokens: int, adapter: str = "", tenant: str = "", weight: float = 1.0
    ) -> Explanation:
        """What would be decided now for a request with this whole prompt."""
        question = Question(len(prompt.token_ids), self.answers.left(max_tokens), adapter=adapter)
        pool = self._pool_view(prompt.keys, commits=False)
        asks = _Asks(question, pool, Claimant(tenant=tenant), weight)
        refuses = self.both.refuses and not pool.is_stale
        choice, found = self._decided(asks, self._both_view(asks), tuple(Way), refuses=refuses)
        where = choice.worker.worker_id if isinstance(choice, Choice) else ""
        return Explanation("", reason=_outcome(choice), ways=tuple(found), worker_id=where)

    def weighed(self, job: Job) -> list[Choice]:
        """All choices for a request, best first: what each was expected to cost. Changes nothing."""
        asks = self._asks(job, self._question(job), commits=False)
        return self._choices(self._both_view(asks), asks)

    def _decided(
        self, asks: _Asks, view: BothView, ways: Sequence[Way], *, refuses: bool
    ) -> tuple[Choice | Refusal | None, list[Choice]]:
        """With the choices that it was made of. Nobody is refused for what engines compute later, nor where a worker
        idles that may be as fast as the others, though it says that it is not."""
        found = self._choices(view, asks, ways)
        choice = by_objective.decide(found, refuses=refuses)
        if isinstance(choice, Refusal) and (behind := self._behind(asks, view)) is not None:
            found = self._choices(self._both_view(asks, behind), asks, ways)
            choice = by_objective.decide(found)
        if not isinstance(choice, Refusal):
            return choice, found
        objectives = self.both.objectives_of(best_effort=asks.question.best_effort)
        row = to_try(asks.pool, asks.question, objectives.planned_ttft_s, self._tried_of_late())
        worker = asks.pool.candidates.workers[row] if row >= 0 else None
        return next((each for each in found if each.worker == worker), choice), found

    def _behind(self, asks: _Asks, view: BothView) -> "Floats | None":
        if asks.whose is None or asks.question.arriving:
            return None
        return self._membership.behind(wire.POOL_DECODE, asks.whose, asks.weight, view.own_s)

    def _told_s(self, asks: _Asks, refusal: Refusal, found: Sequence[Choice]) -> float:
        """When to come back: other routers send theirs back meanwhile, to the same workers."""
        workers = len({each.row for each in found})
        takes_s = refusal.best.prefill_s / workers * (1 + len(self._membership.others))
        return self._returns.told(refusal.retry_after_s, takes_s, self._now_s(), asks.whose or Claimant())

    def _bound(self, job: Job, view: BothView) -> Placement | None:
        source = job.prefilled_by
        row = by_objective.bind(view, self.both.objectives, source)
        if row < 0:
            return None
        worker = view.workers[row]
        if view.is_trial[row]:
            self._tried[worker.worker_id] = self._now_s()
        self.counts.bound += 1
        self.counts.bound_elsewhere += worker.worker_id != source
        self.log.bound(job.request_id, job.tenant, worker.worker_id)
        self.counts.decided(wire.POOL_DECODE, OBJECTIVES)
        self.counts.load_only += self._index.is_stale()
        asked = self._question(job)
        tokens, best_effort = asked.prompt_tokens + asked.max_tokens, is_best_effort(job.priority)
        work = Work(tokens, answer_tokens=asked.max_tokens, best_effort=best_effort)
        return Placement(worker, work, self._prompt(job), job.scope)

    def _choices(self, view: BothView, asks: _Asks, ways: Sequence[Way] = tuple(Way)) -> list[Choice]:
        objectives = self.both.objectives_of(best_effort=asks.question.best_effort)
        return [each for each in self.both.choices(view, objectives) if each.way in ways]

    def _says_why(self, refusal: Refusal, asked: RequestClass) -> str:
        """With the key of the objective, and its value."""
        best_effort = asked is RequestClass.BEST_EFFORT and self.both.best_effort_ttft_s is not None
        objectives = self.both.objectives_of(best_effort=best_effort)
        if refusal.misses_tpot:
            return f"no worker is expected to keep objectives.tpot_s with one request more: {objectives.tpot_s:g} s"
        key = "objectives.best_effort.ttft_s" if best_effort else "objectives.ttft_s"
        return f"no worker is expected to have the first token in time, by {key}: {objectives.ttft_s:g} s"

    def _question(
        self,
        job: Job,
        excluded: frozenset[tuple[str, int]] = _NOBODY,
        avoided: frozenset[tuple[str, int]] = _NOBODY,
    ) -> Question:
        """With the answer that is expected, which what it may become bounds."""
        asked = question_of(job, excluded, avoided)
        return replace(asked, max_tokens=self.answers.left(job.max_tokens, job.emitted_to_prefill))

    def _asks(self, job: Job, question: Question, *, commits: bool = True) -> _Asks:
        """commits: a decision on it will be committed."""
        pool = self._pool_view(self._prompt(job).keys, commits=commits)
        return _Asks(question, pool, Claimant(job.priority, job.tenant), _weight(job))

    def _pool_view(self, keys: Keys, *, commits: bool) -> PoolView:
        pools: Sequence[Pool] = [wire.POOL_DECODE]
        views = self._current_views(keys, pools) if commits else self._views_of(keys, pools, self._now_s())
        pool = views[wire.POOL_DECODE]
        if commits:
            self._look_at_roles()
        return pool

    def _both_view(self, asks: _Asks, behind: "Floats | None" = None) -> BothView:
        """behind: None: all that waits is before it."""
        heavy = self._heavy_of(asks.pool.candidates.workers)
        objectives, tried = self.both.objectives, self._tried_of_late()
        more = behind, tried, self.both.least_tokens, self.both.step_tokens, self._coming(heavy)
        return both_view(asks.pool, asks.question, self.both.costs, objectives, heavy, *more)

    def _coming(self, heavy: Collection[str]) -> float:
        """Of a worker's time, the share that prompts ask for: of those that they are for, or of all."""
        now_s = self._now_s()
        prompts = self.roles.prompts(now_s) + self._membership.others.prefill_rate(now_s)
        workers = len(heavy) or len(self._membership.registered(wire.POOL_DECODE))
        return min(1.0, prompts / max(1, workers))

    def _tried_of_late(self) -> Container[str]:
        now_s = self._now_s()
        self._tried = {each: at_s for each, at_s in self._tried.items() if now_s - at_s < _TRY_AGAIN_S}
        return self._tried

    def _heavy_of(self, usable: Sequence[WorkerSnapshot]) -> frozenset[str]:
        registered = self._membership.registered(wire.POOL_DECODE)
        return self.roles.heavy_of(registered, [each.worker_id for each in usable])

    def _look_at_roles(self) -> None:
        """Where hits are not known prompts seem to take more than they do."""
        now_s = self._now_s()
        if self._index.is_stale():
            self.roles.pause(now_s)
        elif self.roles.is_due(now_s) and len(workers := self._membership.candidates(wire.POOL_DECODE, now_s)):
            self._look_at(workers, now_s)

    def _look_at(self, workers: Candidates, now_s: float) -> None:
        costs = self.both.costs or DecodeCosts.measured(workers.fixed)
        requests, tokens = workers.decoding + workers.coming, workers.decoding_tokens + workers.coming_tokens
        added_s = float((requests * costs.s_per_request + tokens * costs.s_per_token).sum())
        decodes = Decodes(float(np.mean(costs.step_s)), added_s, self.both.objectives.step_s)
        others = self._membership.others
        told = ToldRoles(others.prefill_rate(now_s), others.prefill_heavy)
        self.roles.look(len(self._membership.registered(wire.POOL_DECODE)), decodes, told, now_s)

    def _taken(self, job: Job, view: BothView, choice: Choice) -> Placement:
        decodes_there = choice.way is not Way.APART and view.is_trial[choice.row]
        if decodes_there or choice.is_late:
            self._tried[choice.worker.worker_id] = self._now_s()
        return self._placement(job, view, choice.row, choice.way)

    def _placement(self, job: Job, view: BothView, row: int, way: Way) -> Placement:
        asked = self._question(job)
        uncomputed = round(max(asked.prompt_tokens - float(view.cached_tokens[row]), 1.0))
        apart = way is Way.APART
        host = float(view.host_tokens[row])
        hits = float(view.cached_tokens[row]) - host, host
        self.counts.decided(wire.POOL_PREFILL if apart else wire.POOL_DECODE, OBJECTIVES, asked.prompt_tokens, *hits)
        is_stale = self._index.is_stale()
        self.counts.load_only += is_stale
        if not job.prompt_changes and not is_stale:
            self.roles.prompt(float(view.own_s[row]), self._now_s())
        work = Work(
            asked.prompt_tokens + (0 if apart else asked.max_tokens),
            uncomputed,
            float(view.own_s[row]),
            arriving=apart and job.prompt_changes,
            answer_tokens=0 if apart else asked.max_tokens,
            decodes=not apart,
            best_effort=is_best_effort(job.priority),
            whose=Claimant(job.priority, job.tenant),
            weight=_weight(job),
        )
        return Placement(view.workers[row], work, self._prompt(job), job.scope)


def _weight(job: Job) -> float:
    return job.share.weight or 1.0


def _outcome(choice: Choice | Refusal | None) -> str:
    """What was decided, in a word; empty where no worker may get the request."""
    if choice is None:
        return ""
    if isinstance(choice, Refusal):
        return REFUSED_FOR_TPOT if choice.misses_tpot else REFUSED
    return choice.way.value
