"""A decision of placement as a message: every candidate with every term, the winner, and what was known."""

from collections.abc import Sequence

import numpy as np
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.placement.decision import Choice
from control_plane.placement.decision_log import DecisionLog, Explanation
from control_plane.placement.policy import Decision

# As in `policy`: scores that differ by less are equal.
_EQUAL = 1e-9
_MOST_NAMED = 5
# Candidates of a decision that go into a trace.
MOST_TRACED = 8
# Ids are the clients' own, and the sentence has to fit the metadata of a call.
_MOST_CHARACTERS = 48


def explained(
    explanation: Explanation, configured_policy: str, most: int | None = None
) -> admin.ExplainPlacementResponse:
    """configured_policy: by name; another one was in force only while the index was stale. most: of candidates."""
    prices = explanation.prices
    return admin.ExplainPlacementResponse(
        request_id=explanation.request_id,
        decisions=[decision_of(choice, configured_policy, most) for choice in explanation.choices],
        disaggregation=explanation.reason,
        prices=admin.DisaggregationPrices(
            local_s=prices.local_s, remote_s=prices.remote_s, remainder_tokens=prices.remainder_tokens
        )
        if prices is not None
        else None,
        ways=[
            admin.PlacementWay(
                worker_id=way.worker.worker_id,
                way=way.way,
                ttft_s=way.ttft_s,
                step_s=way.step_s,
                missed=way.missed,
                cost_s=way.cost_s,
            )
            for way in explanation.ways[:most]
        ],
        bound_worker_id=explanation.bound_worker_id,
        worker_id=explanation.worker_id,
    )


def pool_choices(explanation: Explanation, configured_policy: str) -> list[admin.PoolChoice]:
    """Whom each pool would choose."""
    if not explanation.choices:
        who, policy = explanation.worker_id, configured_policy if explanation.ways else ""
        return [admin.PoolChoice(pool=wire.POOL_SHARED, worker_id=who, policy=policy, equals=int(bool(who)))]
    return [
        admin.PoolChoice(
            pool=choice.pool,
            worker_id=choice.worker.worker_id if choice.worker is not None else "",
            policy=choice.policy.name,
            equals=equals(choice.decision),
        )
        for choice in explanation.choices
    ]


def decisions_on(
    log: DecisionLog, configured_policy: str, request_id: str, tenant: str
) -> list[admin.PlacementDecision]:
    """As far as they are remembered; the best few candidates of each alone are made into messages."""
    explanation = log.explanation(request_id, tenant)
    choices = () if explanation is None else explanation.choices
    return [decision_of(choice, configured_policy, MOST_TRACED) for choice in choices]


def decision_of(choice: Choice, configured_policy: str, most: int | None = None) -> admin.PlacementDecision:
    """most: candidates; None: all."""
    decision, question = choice.decision, choice.question
    weights = choice.policy.weights
    return admin.PlacementDecision(
        pool=choice.pool,
        policy=choice.policy.name,
        load_only=choice.policy.name != configured_policy,
        prompt_tokens=question.prompt_tokens,
        max_tokens=question.max_tokens,
        terms=[admin.PlacementTerm(name=name, weight=weights[name]) for name in decision.terms],
        candidates=[_candidate(decision, row) for row in _best_first(decision)[:most]],
        worker_id=choice.worker.worker_id if choice.worker is not None else "",
        equals=equals(decision),
    )


def equals(decision: Decision) -> int:
    """How many had the winner's score; 0 without a winner."""
    if decision.winner < 0:
        return 0
    best = decision.scores[decision.passed].max()
    return int(np.count_nonzero(decision.scores[decision.passed] >= best - _EQUAL))


def not_known(request_id: str, remembered: Sequence[str]) -> str:
    """The sentence for a request that is not among those that are remembered, the last one last."""
    if not remembered:
        return f"no request `{request_id}`; this router has not placed any yet"
    last = ", ".join(map(_shortened, reversed(remembered[-_MOST_NAMED:])))
    return f"no request `{request_id}` among the last {len(remembered)} that this router placed; the latest are: {last}"


def _shortened(request_id: str) -> str:
    return request_id if len(request_id) <= _MOST_CHARACTERS else f"{request_id[: _MOST_CHARACTERS - 3]}..."


def _best_first(decision: Decision) -> list[int]:
    """The winner, then by score; workers that were left out come last."""
    rows = range(len(decision.view.candidates))
    return sorted(rows, key=lambda row: (row != decision.winner, not decision.passed[row], -decision.scores[row]))


def _candidate(decision: Decision, row: int) -> admin.PlacementCandidate:
    view, candidates = decision.view, decision.view.candidates
    worker = candidates.workers[row]
    return admin.PlacementCandidate(
        worker_id=worker.worker_id,
        generation=worker.generation,
        passed=bool(decision.passed[row]),
        terms={name: float(values[row]) for name, values in decision.terms.items()},
        score=float(decision.scores[row]),
        device_tokens=round(view.device[row]),
        host_tokens=round(view.host[row]),
        shared_tokens=round(view.shared[row]),
        sharers=round(view.sharers[row]),
        in_flight_requests=round(candidates.in_flight_requests[row]),
        in_flight_tokens=round(candidates.in_flight_tokens[row]),
        queue_s=float(candidates.queue_s[row]),
    )
