"""Where a request goes among workers that do both, by the objectives for TTFT and TPOT. Pure.

Each worker bounds its prefill chunks so that decodes keep their pace (`decode_worker.step_bound`): beside steps of d
seconds that decode only the share phi = 1 - d / (alpha x TPOT) of its time is left for prompts. A request's TTFT is
expected as
    wait for a place and for memory + (queue + own work less what is cached) / phi
The ways, of each worker:
    whole     prefilled and decoded there
    append    the same, where most of the prompt lies already: the worker holds the conversation
    apart     prefilled there; the decode worker is chosen at the first token (`bind`), not before. The only way on
              prefill-heavy workers, whose chunks are large because little decodes there
The way with the fewest objectives missed is taken, among those the one of least cost: seconds to the first token, own
work at a price (what a hit saves is saved for all that come after), a pull, and for a session what the others that are
open there will bring. A first token that is late beside
decodes misses one more: the worker's bound yields to it, and the decodes miss their TPOT, too. Where no way is expected
in time the request is better refused at once, it would only make others late: in time is TTFT, and for a prompt that
takes an idle worker longer, as long a wait and then what it takes (docs/decisions/0073). Where nothing waits anywhere
nobody is refused for the time that decodes take: it would be no other when it came back. So is a request with which
all workers would miss TPOT, and not alone: it comes back when enough answers have ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from control_plane.fleet.loads import Floats
from control_plane.model.worker_snapshot import WorkerSnapshot

# A second of a request's own work costs so many more seconds of others.
_WORK_PRICE = 2.0
# Of a worker's time, what is left for prompts at least: a bound always computes some.
_LEAST_PHI = 0.1
_TINY_S = 1e-12
# Of a prompt, the cached share above which a worker holds its conversation.
_HELD = 0.5
# What a decode worker's load is worth beside a step as long as the bound: its queue of prompts or a pull as long as the
# TTFT objective; that it is to decode little; a step beyond the bound; and all that the answer may lose without missing
# TPOT, while it waits for a place or for memory: what waits costs others, too, and forecasts of it err most.
_QUEUE_PRICE = 1.0
_HEAVY_PRICE = 2.0
_EXCESS_PRICE = 10.0
_WAIT_PRICE = 40.0
_MOST_WAIT_PRICE = 100.0


class Way(StrEnum):
    WHOLE = "whole"
    APPEND = "append"
    APART = "apart"


@dataclass(frozen=True, slots=True)
class Objectives:
    """alpha: share of TPOT that a step may last while anybody decodes. ttft_margin: share of TTFT that is planned
    with, because predictions err."""

    ttft_s: float
    tpot_s: float
    alpha: float = 0.95
    ttft_margin: float = 0.95

    @property
    def step_s(self) -> float:
        return self.alpha * self.tpot_s

    @property
    def planned_ttft_s(self) -> float:
        return self.ttft_margin * self.ttft_s


@dataclass(frozen=True, slots=True, eq=False)
class BothView:
    """Workers that do both as one request finds them: columns with a row for each."""

    workers: Sequence[WorkerSnapshot]
    prompt_tokens: int
    answer_tokens: int
    # Of the prompt, in either tier, and of that in host memory.
    cached_tokens: Floats
    host_tokens: Floats
    # Engine time of the request's own prefill, and of those before it.
    own_s: Floats
    queue_s: Floats
    # Of a step of what decodes there now; with what will once it is prefilled, and with this request; and with it
    # alone.
    step_s: Floats
    step_with_s: Floats
    # Without end for those who are not refused for their pace.
    alone_s: Floats
    # Until there is a place in the batch, and memory; and until so many answers have ended that its step keeps TPOT.
    wait_s: Floats
    fits_after_s: Floats
    # Of the prompt's KV, from another worker.
    pull_s: Floats
    # To a session, engine time of the prompts of sessions there that still arrive: no first token waits for it.
    arriving_s: Floats
    # Engine time of the prompt tokens that any step computes, whatever decodes.
    least_s: Floats
    # Of others that the steps have which begin and end its prefill.
    in_step_s: Floats
    # It is to decode little.
    is_prefill_heavy: NDArray[np.bool_]
    # It may get the request.
    passes: NDArray[np.bool_]
    # It says that its steps are too long for anybody and decodes nothing, so that it could not learn better: its steps
    # are taken for those of the quickest.
    is_trial: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Choice:
    """One way on one worker, and what it is expected to cost. prefill_s: what its own takes beside what decodes there.
    missed: how many objectives, of its own and of those who decode beside it."""

    row: int
    worker: WorkerSnapshot
    way: Way
    ttft_s: float
    prefill_s: float
    step_s: float
    missed: int
    cost_s: float
    # By when the first token has to be expected, somewhere, for the request not to be refused.
    due_s: float
    # With the request all would miss TPOT, until so long from now; 0 where they would not, or where it is not refused
    # for that.
    full_s: float = 0.0

    @property
    def is_late(self) -> bool:
        return self.ttft_s > self.due_s

    @property
    def retry_after_s(self) -> float:
        """Until it would be no reason to refuse the request, if nothing else came; 0 where it is none now."""
        late_s = self.ttft_s - self.due_s if self.is_late else 0.0
        return max(late_s, self.full_s)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No choice is in time; one will be in `retry_after_s`, if nothing else comes. misses_tpot: one would be in time
    but for the pace of what decodes."""

    best: Choice
    retry_after_s: float
    misses_tpot: bool = False


def choices(view: BothView, objectives: Objectives) -> list[Choice]:
    """All that there are, best first; ties by row."""
    phi = share_for_prompts(view.step_s, objectives, view.least_s)
    prefill_s = _or_never(view.own_s / phi)
    compute_s = _or_never(prefill_s + view.in_step_s)
    ttft_s = _or_never(view.wait_s + view.queue_s / phi + compute_s)
    is_late = ttft_s > objectives.planned_ttft_s
    late = is_late.astype(int) + (is_late & (view.step_s > 0))
    is_over = view.step_with_s > objectives.step_s
    cost_s = ttft_s + _WORK_PRICE * view.own_s + view.arriving_s
    # Apart a request decodes elsewhere, where anybody can take it.
    others_are_over = bool((is_over | ~view.passes).all())
    holds = view.cached_tokens > _HELD * view.prompt_tokens
    # Where no other may get the request, one that is to decode little does.
    others_pass = bool((view.passes & ~view.is_prefill_heavy).any())
    due_s = _due_s(view, compute_s, objectives)
    full_s = _full_s(view, objectives)
    found = []
    for row in np.flatnonzero(view.passes).tolist():
        common = (row, view.workers[row])
        whole = Way.APPEND if holds[row] else Way.WHOLE
        takes = float(ttft_s[row]), float(prefill_s[row]), float(view.step_with_s[row])
        missed, refused_by = int(late[row]), (float(due_s[row]), float(full_s[row]))
        if not (view.is_prefill_heavy[row] and others_pass):
            found.append(Choice(*common, whole, *takes, missed + int(is_over[row]), float(cost_s[row]), *refused_by))
        apart_s = float(cost_s[row] + view.pull_s[row])
        found.append(Choice(*common, Way.APART, *takes, missed + others_are_over, apart_s, *refused_by))
    found.sort(key=lambda choice: (choice.missed, choice.cost_s))
    return found


def decide(found: Sequence[Choice], *, refuses: bool = True) -> Choice | Refusal | None:
    """The first of these that is in time; a refusal where none is. None where there is none at all: no worker may get
    the request. refuses: else the first one in any case."""
    if not found:
        return None
    best = found[0]
    if not refuses:
        return best
    in_time = next((each for each in found if not each.retry_after_s), None)
    misses_tpot = any(not each.is_late for each in found)
    return in_time or Refusal(best, min(each.retry_after_s for each in found), misses_tpot)


def share_for_prompts(step_s: Floats, objectives: Objectives, least_s: "Floats | float" = 0.0) -> Floats:
    """phi, of each worker. least_s: see `BothView`."""
    phi: Floats = np.clip(1.0 - step_s / objectives.step_s, _LEAST_PHI, 1.0)
    some: Floats = least_s / np.maximum(step_s + least_s, _TINY_S)
    return np.maximum(phi, some)


def _or_never(seconds: Floats) -> Floats:
    """Where measurements are beyond all measure, and come to no number."""
    return np.where(np.isnan(seconds), np.inf, seconds)


def _due_s(view: BothView, compute_s: Floats, objectives: Objectives) -> Floats:
    """By when the first token has to be expected, on each worker.

    A prompt that takes an idle worker longer than TTFT is late anyway: it may wait for as long as that and then take
    what it takes, on a prefill-heavy worker as on an idle one. Computed sooner it would make others late. Where nothing
    waits it is not refused, nor is a prompt that would be in time there but for what decodes.
    """
    planned_s = objectives.planned_ttft_s
    idle_s = float(view.own_s[view.passes].min(initial=np.inf))
    due_s = planned_s
    if planned_s < idle_s < np.inf:
        now_s = float(compute_s[view.passes].min())
        alone = (view.passes & view.is_prefill_heavy).any()
        due_s = max(planned_s + (idle_s if alone else now_s), now_s)
    waits_s = view.queue_s + view.wait_s
    if (waits_s[view.passes] > 0).any():
        return np.full(len(waits_s), due_s)
    return np.where(view.own_s <= planned_s, np.maximum(due_s, compute_s), due_s)


def _full_s(view: BothView, objectives: Objectives) -> Floats:
    """Until so many answers have ended, on each worker, that the request may decode there within TPOT, together with
    what a step computes of prompts at least; 0 everywhere where it may somewhere, and where it could nowhere alone."""
    misses = view.step_with_s + view.least_s > objectives.tpot_s
    keeps_alone = view.passes & (view.alone_s + view.least_s <= objectives.tpot_s)
    if not (misses | ~view.passes).all() or not keeps_alone.any():
        return np.zeros(len(misses))
    return np.where(keeps_alone, np.maximum(view.fits_after_s, _TINY_S), np.inf)


def bind(view: BothView, objectives: Objectives, source: str) -> int:
    """The row of the worker that decodes a prompt whose KV lies on `source`; -1 where none may.

    Least loaded: a step as long as the bound counts 1, as much as prompts that wait for as long as the TTFT objective.
    """
    rows = np.flatnonzero(view.passes)
    if not len(rows):
        return -1
    load = decode_loads(view, objectives, source)
    return int(rows[load[rows].argmin()])


def decode_loads(view: BothView, objectives: Objectives, source: str) -> Floats:
    """What `bind` weighs, of each worker."""
    is_away = np.array([each.worker_id != source for each in view.workers])
    fill = view.step_with_s / objectives.step_s
    # Of the answer: what it may lose without missing TPOT.
    pace_s = np.maximum(objectives.tpot_s - view.step_with_s, objectives.tpot_s - objectives.step_s)
    slack_s = pace_s * max(view.answer_tokens, 1)
    return _or_never(
        fill
        + np.where(fill > 1, _EXCESS_PRICE * fill, 0.0)
        + _QUEUE_PRICE * view.queue_s / objectives.ttft_s
        + np.where(is_away, view.pull_s / objectives.ttft_s, 0.0)
        + np.where(view.is_prefill_heavy, _HEAVY_PRICE, 0.0)
        + np.minimum(_WAIT_PRICE * view.wait_s / slack_s, _MOST_WAIT_PRICE)
    )
