"""Workers that do both as a request finds them, from what the router has on each: the columns of `by_objective`."""

from dataclasses import dataclass

import numpy as np

from control_plane.fleet.candidates import Candidates, Fixed
from control_plane.fleet.loads import Floats
from control_plane.placement.by_objective import BothView, Objectives, share_for_prompts
from control_plane.placement.policy import Question, passing
from control_plane.placement.terms import prefill_s
from control_plane.placement.view import PoolView


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
    view: PoolView, question: Question, costs: DecodeCosts | None, objectives: Objectives, prefill_heavy: int
) -> BothView:
    """costs: None: what each worker has measured. prefill_heavy: so many of the workers, the first by name."""
    workers = view.candidates.before(best_effort=question.best_effort)
    costs = costs or DecodeCosts.measured(workers.fixed)
    step_s = costs.of(workers.decoding, workers.decoding_tokens)
    tokens = question.prompt_tokens + question.max_tokens / 2
    step_with_s = costs.of(
        workers.decoding + workers.coming + 1, workers.decoding_tokens + workers.coming_tokens + tokens
    )
    pulled = np.maximum(question.prompt_tokens - view.device, 0.0)
    return BothView(
        workers=workers.workers,
        prompt_tokens=question.prompt_tokens,
        cached_tokens=view.device + view.host,
        own_s=prefill_s(question, view),
        queue_s=workers.queue_at_pace_s(share_for_prompts(step_s, objectives), best_effort=question.best_effort),
        step_s=step_s,
        step_with_s=step_with_s,
        wait_s=_wait_s(workers, question, view, step_s),
        pull_s=workers.fixed.pull_s + pulled * workers.fixed.pull_s_per_token,
        is_prefill_heavy=np.arange(len(workers)) < prefill_heavy,
        passes=passing(question, view),
    )


def _wait_s(workers: Candidates, question: Question, view: PoolView, step_s: Floats) -> Floats:
    """Until so much has ended that there is a place and memory: answers end one after the other, each after as many
    steps as it has tokens."""
    fixed = workers.fixed
    decoding = np.maximum(workers.decoding, 1.0)
    lasting_s = workers.answer_tokens / decoding * step_s
    places = np.maximum(workers.in_flight_requests + 1 - fixed.max_running_requests, 0.0)
    # What requests have in common lies in memory once, what this one has with them as well.
    free = fixed.total_tokens - view.occupied_tokens(workers)
    missing = np.maximum(question.prompt_tokens + question.max_tokens - view.running_tokens - free, 0.0)
    missing = np.where(fixed.total_tokens > 0, missing, 0.0)
    ends = np.maximum(places, missing / np.maximum(workers.decoding_tokens / decoding, 1.0))
    wait_s: Floats = np.where(workers.decoding > 0, ends * lasting_s / decoding, 0.0)
    return wait_s
