"""A decision reads its view and draws from its generator; nothing else is different afterwards."""

import random
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from cluster_core.ids import WorkerId
from control_plane.fleet.candidates import candidates, fixed_columns
from control_plane.fleet.loads import Load
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement.decision import BOTH_POOLS, Choice, Rules
from control_plane.placement.disaggregation import Reason
from control_plane.placement.policy import Question
from control_plane.placement.terms import POLICIES
from control_plane.placement.view import PoolView, unknown_prompt

PREFILL, DECODE = BOTH_POOLS
QUESTION = Question(100, 8)
Decide = Callable[[PoolView, Question, random.Random], Choice]


def view(
    pool: Pool = PREFILL, workers: int = 3, *, is_stale: bool = False, device: int = 0, does_both: bool = False
) -> PoolView:
    """Idle equals, of which the last one has so much of the prompt."""
    own = wire.POOL_SHARED if does_both else pool
    among = [WorkerSnapshot(WorkerId(f"w{number}"), 1, own, "") for number in range(workers)]
    record = wire.WorkerRegistration(max_running_requests=4, costs=wire.WorkerCosts(prefill_s_per_token=1e-3))
    fixed = fixed_columns(among, [record] * workers, [])
    found = unknown_prompt(pool, candidates(fixed, np.zeros((len(Load), workers)), 0.0), is_stale=is_stale)
    found.device[-1:] = device
    return found


def columns(seen: PoolView) -> dict[str, Any]:
    """Every figure of a view."""
    parts: dict[str, Any] = {"view": seen, "candidates": seen.candidates, "fixed": seen.candidates.fixed}
    return {
        f"{part}.{field.name}": value.tolist()
        for part, owner in parts.items()
        for field in fields(owner)
        if isinstance(value := getattr(owner, field.name), np.ndarray)
    }


def check_purity(decide: Decide) -> None:
    """The view is as it was, and the same view and generator decide alike."""
    for pool in BOTH_POOLS:
        seen = view(pool, device=32)
        before, rng = columns(seen), random.Random(5)
        first = decide(seen, QUESTION, rng)
        assert columns(seen) == before, "the view has changed"
        again = decide(seen, QUESTION, random.Random(5))
        assert (again.decision.winner, again.decision.scores.tolist()) == (
            first.decision.winner,
            first.decision.scores.tolist(),
        ), "it depends on what was decided before"


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_leaves_its_view_as_it_was(name: str) -> None:
    rules = Rules.of(PlacementSection(policy=name))
    check_purity(rules.decide)


def test_a_decision_that_changes_its_view_or_remembers_anything_is_noticed() -> None:
    rules = Rules.of(PlacementSection())
    decided: list[int] = []

    def takes_a_place(seen: PoolView, question: Question, rng: random.Random) -> Choice:
        choice = rules.decide(seen, question, rng)
        seen.candidates.in_flight_requests[choice.decision.winner] += 1
        return choice

    def takes_turns(seen: PoolView, question: Question, rng: random.Random) -> Choice:
        decided.append(1)
        failed = frozenset({(f"w{3 - len(decided) % 2}", 1), (f"w{2 - len(decided) % 2}", 1)})
        return rules.decide(seen, Question(question.prompt_tokens, question.max_tokens, failed), rng)

    with pytest.raises(AssertionError, match="the view has changed"):
        check_purity(takes_a_place)
    with pytest.raises(AssertionError, match="decided before"):
        check_purity(takes_turns)


def test_only_a_choice_between_equals_is_drawn() -> None:
    rules, rng = Rules.of(PlacementSection()), random.Random(1)
    before = rng.getstate()
    assert rules.decide(view(device=32), QUESTION, rng).decision.winner == 2
    assert rng.getstate() == before
    rules.decide(view(), QUESTION, rng)
    assert rng.getstate() != before


def test_a_stale_index_leaves_load_alone_to_decide() -> None:
    rules = Rules.of(PlacementSection())
    choice = rules.decide(view(is_stale=True), QUESTION, random.Random(0))
    assert (choice.policy.name, choice.view.is_stale) == ("least_loaded", True)


# The first decision on a request.


def routed(views: Mapping[Pool, PoolView], *, is_whole: bool = True, rng: random.Random, **settings: Any) -> Any:
    return Rules.of(PlacementSection(**settings)).route(views, QUESTION, rng, is_whole=is_whole)


def test_where_the_two_ways_are_not_compared_the_decode_pool_is_not_looked_at() -> None:
    prefill_only = {PREFILL: view()}
    for is_whole, settings, reason in (
        (True, {"disaggregation": "always"}, Reason.ALWAYS),
        (False, {}, Reason.SESSION),
    ):
        route = routed(prefill_only, is_whole=is_whole, rng=random.Random(0), **settings)
        assert (route.reason, route.prices, route.is_local) == (reason, None, False)


@pytest.mark.parametrize(
    ("workers", "reason", "is_local"),
    [((0, 2), Reason.PREFILL_DOWN, True), ((2, 0), Reason.DECODE_DOWN, False), ((0, 0), Reason.PREFILL_DOWN, True)],
)
def test_a_pool_without_workers_decides_the_way(workers: tuple[int, int], reason: Reason, is_local: bool) -> None:
    views = {pool: view(pool, number) for pool, number in zip(BOTH_POOLS, workers, strict=True)}
    route = routed(views, rng=random.Random(0))
    assert (route.reason, route.is_local, route.prices) == (reason, is_local, None)


@pytest.mark.parametrize(
    ("settings", "is_whole", "reason"),
    [
        ({}, True, Reason.WHOLE),
        ({"local_prefill_tokens": 0}, True, Reason.WHOLE),
        ({}, False, Reason.SESSION),
        ({"disaggregation": "always"}, True, Reason.ALWAYS),
    ],
)
def test_workers_that_do_both_keep_a_whole_prompt_and_prefill_what_still_arrives(
    settings: dict[str, Any], is_whole: bool, reason: Reason
) -> None:
    views = {pool: view(pool, does_both=True) for pool in BOTH_POOLS}
    route = routed(views, is_whole=is_whole, rng=random.Random(0), **settings)
    assert (route.reason, route.is_local, route.prices) == (reason, reason is Reason.WHOLE, None)
    assert {"ttft", "room"} <= route.prefill.decision.terms.keys(), "whoever prefills is likely to decode as well"


def test_without_a_usable_worker_that_does_both_the_request_waits_for_one() -> None:
    views = {pool: view(pool, 0) for pool in BOTH_POOLS}
    assert routed(views, rng=random.Random(0)).is_local


def test_comparing_draws_for_the_prefill_pool_first_and_once_for_each() -> None:
    views = {pool: view(pool) for pool in BOTH_POOLS}
    rules = Rules.of(PlacementSection(local_prefill_tokens=0))
    for seed in range(20):
        rng, one_by_one = random.Random(seed), random.Random(seed)
        route = rules.route(views, QUESTION, rng, is_whole=True)
        prefill, _ = (rules.decide(views[pool], QUESTION, one_by_one) for pool in BOTH_POOLS)
        assert route.prefill.worker == prefill.worker
        assert rng.getstate() == one_by_one.getstate()
