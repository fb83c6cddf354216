"""What placement decided so far, in counts. A decision is counted for each attempt of a request that got a worker."""

from collections import Counter
from dataclasses import dataclass, field

from control_plane.model.worker_snapshot import Pool
from control_plane.placement.disaggregation import Reason
from control_plane.placement.policy import Decision, Question


@dataclass(slots=True)
class PlacementCounts:
    """decisions: by pool and the policy in force. load_only: of them, while the index was stale.

    reasons: why requests were, or were not, disaggregated. prompt_tokens: of placed requests, by pool.
    device_hit_tokens, host_hit_tokens: what the chosen workers had of them as far as was known, by pool.
    """

    decisions: Counter[tuple[Pool, str]] = field(default_factory=Counter)
    load_only: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    prompt_tokens: Counter[Pool] = field(default_factory=Counter)
    device_hit_tokens: Counter[Pool] = field(default_factory=Counter)
    host_hit_tokens: Counter[Pool] = field(default_factory=Counter)

    def placed(self, pool: Pool, policy: str, question: Question, decision: Decision, *, load_only: bool) -> None:
        """Without a winner nothing is counted: somebody waits for a worker."""
        row = decision.winner
        if row < 0:
            return
        self.decisions[pool, policy] += 1
        self.load_only += load_only
        self.prompt_tokens[pool] += question.prompt_tokens
        self.device_hit_tokens[pool] += round(question.device[row])
        self.host_hit_tokens[pool] += round(question.host[row])
