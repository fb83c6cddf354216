"""What is supposed equals what is then placed, and leaves nothing behind; what is decided is committed once."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.decision import Choice, Rules
from control_plane.placement.disaggregation import Reason
from control_plane.placement.placer import Placement
from control_plane.placement.policy import Question
from control_plane.placement.view import PoolView
from tests.pure.control_plane.placement.router_world import DECODE, PREFILL, RouterWorld, prompt

REMOTE: dict[str, Any] = {"local_prefill_tokens": 0}
ALWAYS: dict[str, Any] = {"disaggregation": "always"}


def busy(world: RouterWorld) -> None:
    """Some requests have come; one is on its worker, and what was predicted of another has ended."""
    world.holds("p1", prompt(1))
    flight = world.placer.begin(placed(world, prompt(2)))
    world.now_s += 6.0
    flight.end()
    world.placer.begin(placed(world, prompt(3)))


def placed(world: RouterWorld, tokens: list[int]) -> Placement:
    placement = world.placer.place(world.job(tokens), PREFILL)
    assert placement is not None
    return placement


def check_that_nothing_is_left(world: RouterWorld, ask: Callable[[], Any]) -> None:
    before = world.left_behind()
    ask()
    after = world.left_behind()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"left behind in: {changed}"


@pytest.mark.parametrize("settings", [REMOTE, ALWAYS, {}])
def test_a_supposed_request_leaves_nothing_behind(settings: dict[str, Any]) -> None:
    world = RouterWorld(**settings)
    busy(world)
    for seed in (1, 2, 3, 4):
        packed = world.placer.packed(prompt(seed), PrefixScope())
        check_that_nothing_is_left(world, lambda packed=packed: world.placer.supposed(packed, 8))  # type: ignore[misc]
        check_that_nothing_is_left(world, lambda packed=packed: world.placer.matches(packed.keys))  # type: ignore[misc]


@pytest.mark.parametrize("settings", [REMOTE, ALWAYS])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_supposed_is_what_is_then_placed_also_between_equals(seed: int, settings: dict[str, Any]) -> None:
    world = RouterWorld(seed, **settings)
    busy(world)
    for tokens in (prompt(1), prompt(2), prompt(3), prompt(4)):
        expected = world.placer.supposed(world.placer.packed(tokens, PrefixScope()), 8)
        job = world.job(tokens)
        prefill = world.placer.route(job, is_whole=True)
        explanation = world.placer.log.explanation(job.request_id)
        assert prefill is not None and explanation is not None
        assert expected.choices[0].worker == prefill.worker
        assert expected.choices[0].decision.scores.tolist() == explanation.choices[0].decision.scores.tolist()
        assert (expected.reason, expected.prices) == (explanation.reason, explanation.prices)
        if settings is ALWAYS:
            decode = world.placer.place(job, DECODE)
            assert decode is not None and expected.choices[1].worker == decode.worker


def test_a_prediction_that_has_ended_is_not_believed_before_it_is_withdrawn() -> None:
    world = RouterWorld(**ALWAYS)
    world.placer.begin(placed(world, prompt(1))).end()
    packed = world.placer.packed(prompt(1), PrefixScope())
    assert world.placer.supposed(packed, 8).choices[0].view.device.max() == 160
    world.now_s += 6.0
    assert world.placer.supposed(packed, 8).choices[0].view.device.max() == 0
    assert world.placer.matches(packed.keys).warm.max() == 0
    assert world.predictions == 1, "it is there until something is placed"


def test_a_decision_with_effects_is_noticed() -> None:
    """Planted: it counts, or it draws from the generator of requests."""
    world = RouterWorld(**REMOTE)
    decide = Rules.decide
    packed = world.placer.packed(prompt(1), PrefixScope())

    def counting(rules: Rules, view: PoolView, question: Question, rng: random.Random, **given: bool) -> Choice:
        choice = decide(rules, view, question, rng, **given)
        world.placer.counts.placed(choice)
        return choice

    def drawing(rules: Rules, view: PoolView, question: Question, rng: random.Random, **given: bool) -> Choice:
        return decide(rules, view, question, world.rng, **given)

    for planted, trace in ((counting, "counts"), (drawing, "rng")):
        # Planted.
        with mock.patch.object(Rules, "decide", planted), pytest.raises(AssertionError, match=trace):
            check_that_nothing_is_left(world, lambda: world.placer.supposed(packed, 8))


# What is committed.


def test_a_request_that_is_routed_is_committed_once() -> None:
    world = RouterWorld(**REMOTE)
    job = world.job(prompt(1))
    assert world.placer.route(job, is_whole=True) is not None
    ledger, counts = world.ledger, world.placer.counts
    explanation = world.placer.log.explanation(job.request_id)
    assert explanation is not None
    assert counts.reasons == {Reason.LONG_REMAINDER: 1}
    assert counts.decisions == {(PREFILL, "hotness"): 1}
    assert (len(explanation.choices), len(ledger.recent)) == (1, 1)
    assert not len(ledger.running) and not world.predictions, "it has not been sent yet"


def test_a_request_whose_prompt_the_decode_pool_computes_is_placed_on_no_prefill_worker() -> None:
    world = RouterWorld()
    world.holds("d1", prompt(1))
    job = world.job(prompt(1))
    assert world.placer.route(job, is_whole=True) is None
    explanation = world.placer.log.explanation(job.request_id)
    assert explanation is not None and explanation.prices is not None
    assert (explanation.reason, len(explanation.choices)) == (Reason.SHORT_REMAINDER, 0)
    assert (world.placer.counts.decisions, len(world.ledger.recent)) == ({}, 0)
    placement = world.placer.place(job, DECODE, prefills=True)
    assert placement is not None and placement.worker.worker_id == "d1" and placement.work.expected_s > 0


@pytest.mark.parametrize(("settings", "reason"), [(ALWAYS, Reason.ALWAYS), ({}, Reason.PREFILL_DOWN)])
def test_without_a_prefill_worker_the_decode_pool_computes_the_prompt(settings: dict[str, Any], reason: Reason) -> None:
    world = RouterWorld(**settings)
    world.without(PREFILL)
    assert world.placer.route(world.job(prompt(1)), is_whole=True) is None
    assert (world.placer.counts.reasons, world.placer.counts.decisions) == ({reason: 1}, {})


def test_a_whole_prompt_on_workers_that_do_both_is_placed_once_where_it_is_soonest_and_decodes() -> None:
    world = RouterWorld()
    world.does_both()
    world.holds("d1", prompt(1))
    job = world.job(prompt(1))
    assert world.placer.route(job, is_whole=True) is None
    placement = world.placer.place(job, DECODE, prefills=True)
    assert placement is not None and placement.worker.worker_id == "d1"
    assert placement.work.decodes and placement.work.expected_s == pytest.approx(1e-3), "all but one token is there"
    supposed = world.placer.supposed(world.placer.packed(prompt(1), PrefixScope()), 8)
    for explanation in (world.placer.log.explanation(job.request_id), supposed):
        assert explanation is not None and explanation.reason is Reason.WHOLE
        assert [(each.pool, each.worker) for each in explanation.choices] == [(DECODE, placement.worker)]


def test_a_session_on_workers_that_do_both_decodes_where_its_kv_lies_unless_that_one_is_full() -> None:
    world = RouterWorld()
    world.does_both()
    job = world.job(prompt(1))
    job.prompt_changes = True
    source = world.placer.route(job, is_whole=False)
    assert source is not None and not source.work.decodes
    world.placer.begin(source).end()
    stays = world.placer.place(job, DECODE)
    assert stays is not None and stays.worker == source.worker
    other = replace(stays, prompt=world.placer.packed(prompt(2), PrefixScope()))
    for _ in range(40):
        world.placer.begin(other)
    leaves = world.placer.place(job, DECODE)
    assert leaves is not None and leaves.worker != source.worker


def test_a_second_name_for_a_request_replaces_what_was_explained() -> None:
    world = RouterWorld(**ALWAYS)
    job = world.job(prompt(1))
    for _ in range(2):
        world.placer.route(job, is_whole=True)
        world.placer.place(job, DECODE)
    explanation = world.placer.log.explanation(job.request_id)
    assert explanation is not None and [choice.pool for choice in explanation.choices] == [PREFILL, DECODE]


# In flight.


def in_flight(world: RouterWorld, name: str) -> tuple[int, int, float]:
    """Requests, tokens, and seconds of prefill before the next one."""
    member = world.membership.get(name)
    assert member is not None
    queues = world.placer.prefill_queues()
    return member.in_flight_requests, member.in_flight_tokens, round(queues.get(name, 0.0), 3)


def test_a_flight_counts_on_its_worker_until_it_ends_and_ends_once() -> None:
    world = RouterWorld()
    placement = placed(world, prompt(1))
    name = placement.worker.worker_id
    first, second = world.placer.begin(placement), world.placer.begin(placement)
    assert in_flight(world, name) == (2, 320, 0.32)
    first.prefilled()
    assert in_flight(world, name) == (2, 320, 0.16)
    first.end()
    first.end()
    first.prefilled()
    assert in_flight(world, name) == (1, 160, 0.16)
    assert len(world.ledger.running), "the prefix of the other one runs there"
    second.end()
    second.end()
    assert in_flight(world, name) == (0, 0, 0.0) and not len(world.ledger.running)
    world.membership.check_invariants()


def test_a_flight_on_a_worker_that_is_gone_ends_without_a_trace() -> None:
    world = RouterWorld()
    placement = placed(world, prompt(1))
    world.without(PREFILL)
    world.placer.begin(placement).end()
    assert not len(world.ledger.running)


def test_a_whole_prompt_counts_as_one_access_and_a_fragment_of_a_chunk_as_none() -> None:
    world = RouterWorld()
    world.placer.keep(world.job(prompt(1)))
    world.placer.keep(world.job([1, 2, 3]))
    assert [len(keys) for keys in world.accesses] == [10]


@pytest.mark.parametrize("what", ["predict", "add"])
def test_a_request_that_could_not_be_sent_is_counted_nowhere(what: str) -> None:
    world = RouterWorld()
    placement = placed(world, prompt(1))
    before = world.left_behind()["loads"]
    target = world.index if what == "predict" else world.ledger.running
    # A defect of our own code has no port.
    with mock.patch.object(target, what, side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        world.placer.begin(placement)
    assert world.left_behind()["loads"] == before


def test_a_request_whose_prefix_cannot_be_taken_back_is_not_counted_any_more() -> None:
    world = RouterWorld()
    placement = placed(world, prompt(1))
    flight = world.placer.begin(placement)
    with (
        # A defect of our own code has no port.
        mock.patch.object(world.ledger.running, "remove", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        flight.end()
    member = world.membership.get(placement.worker.worker_id)
    assert member is not None
    assert (member.in_flight_requests, member.in_flight_tokens) == (0, 0)
