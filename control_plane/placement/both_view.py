"""Workers that do both as a request finds them, from what the router has on each: the columns of `by_objective`."""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from control_plane.fleet.candidates import Candidates, Fixed
from control_plane.fleet.loads import Floats
from control_plane.placement.by_objective import BothView, Objectives, share_for_prompts
from control_plane.placement.policy import Question, passing
from control_plane.placement.terms import prefill_s, sessions_s
from control_plane.placement.view import PoolView

# Of a worker: decodes beside which one more is never one too many, as forecasts go.
_FEW = 2
_TINY_S = 1e-12
_PREFILL_COSTS = ("prefill_s", "prefill_s_per_token", "prefill_s_per_pair", "load_s_per_token")


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Seconds of a step that decodes: whatever it decodes, for each request, and for each token attended to."""

    step_s: "Floats | float"
    s_per_request: "Floats | float"
    s_per_token: "Floats | float"

    @classmethod
    def measured(cls, fixed: Fixed) -> "DecodeCosts":
        """By each worker's own account."""
        return cls(fixed.decode_s, fixed.decode_s_per_request, fixed.decode_s_per_token)

    def of(self, requests: Floats, tokens: Floats) -> Floats:
        """0 where nothing decodes."""
        seconds = self.step_s + requests * self.s_per_request + tokens * self.s_per_token
        return np.where(requests > 0, seconds, 0.0)


def both_view(
    view: PoolView,
    question: Question,
    costs: DecodeCosts | None,
    objectives: Objectives,
    prefill_heavy: Container[str],
    behind: "Floats | None" = None,
    tried: Container[str] = (),
    least_tokens: int = 16,
    step_tokens: int = 8192,
    coming: float = 1.0,
) -> BothView:
    """costs: None: what each worker has measured. prefill_heavy: workers by name. behind: of what waits, what engines
    compute after it (`Membership.behind`). tried: workers whose steps are as slow as they say: see
    `BothView.is_trial`. least_tokens, step_tokens: of prompts, that any step computes at least and at most.
    coming: of a worker's time, the share that is asked for by the prompts that come."""
    workers = view.candidates.before(best_effort=question.best_effort)
    workers = workers if behind is None else workers.without(behind)
    costs = costs or DecodeCosts.measured(workers.fixed)
    step_s = costs.of(workers.decoding, workers.decoding_tokens)
    tokens = question.prompt_tokens + question.max_tokens / 2
    will_decode = workers.decoding + workers.coming + 1, workers.decoding_tokens + workers.coming_tokens + tokens
    step_with_s = costs.of(*_in_one_step(workers, *will_decode))
    alone_s = costs.of(np.ones(len(workers)), np.full(len(workers), tokens))
    passes = passing(question, view)
    quickest_s = alone_s[passes].min(initial=np.inf)
    is_untried = np.array([each.worker_id not in tried for each in workers.workers], dtype=np.bool_)
    is_slow_alone = (step_with_s > objectives.step_s) & (quickest_s <= objectives.step_s)
    is_trial = is_untried & (will_decode[0] <= 1) & is_slow_alone
    step_with_s = np.where(is_trial, quickest_s, step_with_s)
    least_s = least_tokens * workers.fixed.prefill_s_per_token
    pace = share_for_prompts(step_s, objectives, least_s)
    wait_s, next_end_s = _waits_s(workers, question, view, costs)
    # Each that ends takes its part of the step with it.
    part_s = np.maximum((step_with_s - costs.step_s) / will_decode[0], _TINY_S)
    ends = np.ceil((step_with_s + least_s - objectives.tpot_s) / part_s)
    queue_s = workers.queue_at_pace_s(pace, best_effort=question.best_effort)
    is_heavy = np.array([each.worker_id in prefill_heavy for each in workers.workers], dtype=np.bool_)
    behind_s = np.minimum(queue_s, step_tokens * workers.fixed.prefill_s_per_token) * coming / 2
    return BothView(
        workers=workers.workers,
        prompt_tokens=question.prompt_tokens,
        answer_tokens=question.max_tokens,
        cached_tokens=view.device + view.host,
        host_tokens=view.host,
        own_s=prefill_s(question, view),
        queue_s=queue_s,
        step_s=step_s,
        least_s=least_s,
        in_step_s=_in_step_s(workers, costs, step_s, behind_s, is_heavy),
        step_with_s=step_with_s,
        alone_s=alone_s if _is_paced(question, workers, will_decode[0], passes) else np.full(len(workers), np.inf),
        wait_s=wait_s,
        fits_after_s=next_end_s * np.maximum(ends, 1.0),
        pull_s=_pull_s(question, view),
        arriving_s=workers.arriving_s * question.arriving + sessions_s(question, view),
        is_prefill_heavy=is_heavy,
        passes=passes,
        is_trial=is_trial,
    )


def to_try(view: PoolView, question: Question, ttft_s: float, tried: Container[str]) -> int:
    """The row of a worker with nothing in flight, and not tried already, that would have the first token in time if its
    prefills took what they take on the quickest of its pool; -1 without one.

    Who says that it is slow gets nothing that has to be in time, and never learns better: after a start, say, whose
    first prompt compiled something. So does one that took long to load an adapter, and gets none to load again: what
    loading takes counts for nothing here, and is over for those that come next.
    """
    workers, fixed = view.candidates, view.candidates.fixed
    least: dict[str, Any] = {
        name: np.full(len(workers), getattr(fixed, name).min(initial=np.inf)) for name in _PREFILL_COSTS
    } | {"adapter_load_s": np.zeros(len(workers))}
    quickest = replace(view, candidates=replace(workers, fixed=replace(fixed, **least)))
    is_new = np.array([each.worker_id not in tried for each in workers.workers], dtype=np.bool_)
    is_idle = passing(question, view) & (workers.in_flight_requests == 0) & is_new
    own_s = np.where(is_idle, prefill_s(question, quickest), np.inf)
    row = int(own_s.argmin())
    return row if own_s[row] <= ttft_s else -1


def _is_paced(question: Question, workers: Candidates, will_decode: Floats, passes: NDArray[np.bool_]) -> bool:
    """Best effort is never refused for its pace, so that nobody else is where it decodes."""
    is_best_effort = question.best_effort or workers.best_effort[passes].any()
    return not is_best_effort and bool((will_decode[passes] > _FEW).all())


def _pull_s(question: Question, view: PoolView) -> Floats:
    pulled, fixed = np.maximum(question.prompt_tokens - view.device, 0.0), view.candidates.fixed
    return fixed.pull_s + pulled * fixed.pull_s_per_token


def _in_step_s(
    workers: Candidates, costs: DecodeCosts, step_s: Floats, behind_s: Floats, is_heavy: NDArray[np.bool_]
) -> Floats:
    """What a first token waits for others in the same steps: it comes at the end of one. step_s: of those that decode.
    behind_s: prompts that come meanwhile.

    Where answers decode half of such a step is under way when the prompt comes, and half of one ends after its last
    tokens. Where none does yet, and on prefill-heavy workers, prompts that wait are computed together, as many as a
    step holds: half as many come behind it, until its step begins, as wait before it, where all of a worker's time is
    asked for; fewer where less is, and behind the last of a burst nobody. Those before it may decode by then.
    """
    coming_step_s = costs.of(*_in_one_step(workers, np.maximum(workers.coming, 1.0), workers.coming_tokens))
    decode_s = np.where(step_s > 0, step_s, np.where(workers.coming > 0, coming_step_s, 0.0))
    return np.where(is_heavy | (step_s <= 0), np.maximum(behind_s, decode_s), decode_s)


def _in_one_step(workers: Candidates, requests: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    """Of what decodes or will on each worker, so many and with so much context, what one step has: the others wait for
    a place or for memory."""
    fixed = workers.fixed
    places = np.where(fixed.max_running_requests > 0, fixed.max_running_requests, np.inf)
    memory = np.where(fixed.total_tokens > 0, fixed.total_tokens * requests / np.maximum(tokens, 1.0), np.inf)
    share = np.minimum(1.0, np.maximum(np.minimum(places, memory), 1.0) / requests)
    return requests * share, tokens * share


def _waits_s(workers: Candidates, question: Question, view: PoolView, costs: DecodeCosts) -> tuple[Floats, Floats]:
    """Until so much has ended that there is a place and memory, and until the next answer ends: they end one after the
    other, each after as many steps as it has tokens. Where none decodes yet, those that will have come together, and
    end so."""
    fixed = workers.fixed
    decode = workers.decoding > 0
    together = np.minimum(workers.coming, fixed.max_running_requests)
    at_a_time = np.maximum(np.where(decode, workers.decoding, together), 1.0)
    context = np.where(
        decode, workers.decoding_tokens / at_a_time, workers.coming_tokens / np.maximum(workers.coming, 1.0)
    )
    answer_tokens = workers.answer_tokens / np.maximum(workers.decoding + workers.coming, 1.0)
    lasting_s = answer_tokens * costs.of(at_a_time, at_a_time * context)
    places = np.maximum(workers.in_flight_requests + 1 - fixed.max_running_requests, 0.0)
    # What requests have in common lies in memory once, what this one has with them as well.
    free = fixed.total_tokens - view.occupied_tokens(workers)
    missing = np.maximum(question.prompt_tokens + question.max_tokens - view.running_tokens - free, 0.0)
    missing = np.where(fixed.total_tokens > 0, missing, 0.0)
    rounds = np.maximum(places, missing / np.maximum(context, 1.0)) / at_a_time
    wait_s: Floats = np.where(decode, rounds, np.ceil(rounds)) * lasting_s
    return wait_s, lasting_s / at_a_time
