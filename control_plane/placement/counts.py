"""What placement decided so far, in counts. A decision is counted for each attempt of a request that got a worker."""

from collections import Counter
from dataclasses import dataclass, field

from cluster_core.objectives import RequestClass
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.by_objective import Way
from control_plane.placement.decision import Choice, RouteChoice
from control_plane.placement.disaggregation import Reason


@dataclass(slots=True)
class PlacementCounts:
    # By pool and the policy in force.
    decisions: Counter[tuple[Pool, str]] = field(default_factory=Counter)
    # Of them, while the index was stale.
    load_only: int = 0
    # Why requests were, or were not, disaggregated.
    reasons: Counter[Reason] = field(default_factory=Counter)
    # Of placed requests, by pool.
    prompt_tokens: Counter[Pool] = field(default_factory=Counter)
    # What the chosen workers had of them as far as was known, by pool.
    device_hit_tokens: Counter[Pool] = field(default_factory=Counter)
    host_hit_tokens: Counter[Pool] = field(default_factory=Counter)
    # By the objectives: ways that were taken, and requests refused because none kept TTFT, by class.
    ways: Counter[Way] = field(default_factory=Counter)
    refused: Counter[RequestClass] = field(default_factory=Counter)
    # Of the requests prefilled apart: bound to a worker for decode, and to another one than has prefilled.
    bound: int = 0
    bound_elsewhere: int = 0

    def routed(self, route: RouteChoice) -> None:
        self.reasons[route.reason] += 1

    def placed(self, choice: Choice) -> None:
        """Without a winner nothing is counted: the request waits for a worker."""
        row, view = choice.decision.winner, choice.view
        if row < 0:
            return
        self.load_only += view.is_stale
        hits = float(view.device[row]), float(view.host[row])
        self.decided(choice.pool, choice.policy.name, choice.question.prompt_tokens, *hits)

    def decided(
        self, pool: Pool, policy: str, prompt_tokens: int = 0, device_hit: float = 0.0, host_hit: float = 0.0
    ) -> None:
        """A request has got a worker. prompt_tokens: of it; the chosen worker had so many on the device and in host
        memory, as far as was known."""
        self.decisions[pool, policy] += 1
        self.prompt_tokens[pool] += prompt_tokens
        self.device_hit_tokens[pool] += round(device_hit)
        self.host_hit_tokens[pool] += round(host_hit)
