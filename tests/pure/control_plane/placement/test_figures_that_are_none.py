"""Figures that are no numbers, from a worker's registration or another router: placement goes on without them."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.membership import Membership
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.policy import Decision, Question
from control_plane.placement.terms import POLICIES, make_policy
from control_plane.placement.view import unknown_prompt

PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
NO_NUMBERS = (math.nan, math.inf, -math.inf, -1e-3)
USUAL = wire.WorkerCosts(prefill_s_per_token=1e-4, decode_s=0.01, pull_s=0.05)


def service(*costs: wire.WorkerCosts, pool: Pool = PREFILL) -> Membership:
    membership = Membership()
    membership.replace(
        wire.WorkerRegistration(
            worker_id=f"worker-{number}", generation=1, pool=pool, state=wire.WORKER_STATE_READY, costs=each
        )
        for number, each in enumerate(costs)
    )
    for member in membership.members():
        member.version_skew = ""
    return membership


def chosen(membership: Membership, policy: str = "hotness", pool: Pool = PREFILL) -> Decision:
    view = unknown_prompt(pool, membership.candidates(pool, 1.0))
    return make_policy(policy, pool, does_both=pool == DECODE).choose(Question(1000, 10), view, random.Random(0))


@pytest.mark.parametrize("bad", NO_NUMBERS)
def test_a_cost_that_is_no_number_counts_as_not_measured(bad: float) -> None:
    """Nor does what was measured with it: the others' is taken."""
    membership = service(wire.WorkerCosts(prefill_s=0.5, prefill_s_per_token=bad), USUAL)
    fixed = membership.candidates(PREFILL, 1.0).fixed
    assert fixed.prefill_s.tolist() == [0.0, 0.0] and fixed.prefill_s_per_token.tolist() == [1e-4, 1e-4]
    assert chosen(membership).scores == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("bad", NO_NUMBERS)
def test_what_another_router_says_that_is_no_number_counts_as_not_told(bad: float) -> None:
    membership = service(USUAL, USUAL)
    decodes = wire.DecodeShare(requests=1, tokens=bad, coming_tokens=bad, answer_tokens=bad)
    told = wire.WorkerShare(worker_id="worker-0", generation=1, requests=3, queue_s=bad, ahead_s=bad, decodes=decodes)
    membership.others.heard("peer", wire.RouterLoads(number=1, workers=[told]), 1.0)
    seen = membership.candidates(PREFILL, 1.0)
    assert seen.queue_s.tolist() == [0.0, 0.0] and seen.in_flight_requests.tolist() == [3.0, 0.0]
    assert seen.decoding_tokens.tolist() == seen.answer_tokens.tolist() == [0.0, 0.0]
    assert membership.others.queue_s("worker-0", 1, 1.0) == 0.0
    assert chosen(membership).winner >= 0


ANYTHING = st.one_of(st.sampled_from([*NO_NUMBERS, 0.0, 1.7e308]), st.floats(0, 1))
COSTS = st.builds(
    wire.WorkerCosts,
    prefill_s=ANYTHING,
    prefill_s_per_token=ANYTHING,
    load_s_per_token=ANYTHING,
    pull_s_per_token=ANYTHING,
    adapter_load_s=ANYTHING,
)


@given(st.lists(COSTS, min_size=1, max_size=3), ANYTHING, st.sampled_from(POLICIES), st.sampled_from([PREFILL, DECODE]))
def test_whatever_is_said_somebody_is_chosen_by_a_score(
    costs: list[wire.WorkerCosts], queue_s: float, policy: str, pool: Pool
) -> None:
    membership = service(*costs, pool=pool)
    told = wire.WorkerShare(worker_id="worker-0", generation=1, queue_s=queue_s)
    membership.others.heard("peer", wire.RouterLoads(number=1, workers=[told]), 1.0)
    decision = chosen(membership, policy, pool)
    assert decision.winner >= 0
    assert np.isfinite(decision.scores).all()


def test_who_is_beyond_all_measure_comes_last() -> None:
    membership = service(wire.WorkerCosts(prefill_s_per_token=1.7e308), USUAL)
    assert chosen(membership).scores == pytest.approx([0.0, 1.0])
    for alone in (1, 2):
        all_are = service(*[wire.WorkerCosts(prefill_s_per_token=1.7e308)] * alone)
        assert chosen(all_are).winner >= 0
