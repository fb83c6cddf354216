"""Bugs of a journey, planted to see that the model of `played_journey` notices them."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from control_plane.dispatch import journey as journeys
from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.journey import Journey
from control_plane.dispatch.journey_steps import Stage


def _released_at_once(journey: Journey) -> journeys.Instructions:
    instructions = _RELEASED(journey)
    for each in instructions:
        assert isinstance(each, steps.Release)
        each.lease.safe_at_s = 0.0
    return instructions


def _never_released(journey: Journey) -> journeys.Instructions:
    journey._lease = None
    return ()


def _always_told(journey: Journey, _worker: object, now_s: float) -> bool:
    if journey._lease is not None:
        journey._lease.safe_at_s = now_s + journey._limits.handoff_deadline_s
    return journey._lease is not None


def _tries_on(_journey: Journey) -> bool:
    return False


def _first_token_twice(journey: Journey, event: steps.Prefilled, now_s: float) -> journeys.Instructions:
    instructions = _PREFILLED(journey, event, now_s)
    return (*(each for each in instructions if isinstance(each, steps.Emit)), *instructions)


def _forgotten(_journey: Journey, piece: Any, token_ids: Sequence[int], chars: int) -> steps.Emit:
    return steps.Emit(piece)


def _migrates_for_ever(journey: Journey) -> journeys.Instructions:
    journey._fruitless = 0
    return _MIGRATE(journey)


def _lease_forgotten(journey: Journey, event: steps.HandedOver, now_s: float) -> journeys.Instructions:
    instructions = _HANDED_OVER(journey, event, now_s)
    journey._lease = None
    return instructions


_RELEASED, _PREFILLED, _MIGRATE = Journey._released, Journey._prefilled, Journey._migrate
_HANDED_OVER = Journey._handed_over

# Bugs by name: what is put in the place of what, and the sentence by which the model notices.
PLANTED: dict[str, tuple[Callable[[], Any], str]] = {
    "late release": (
        lambda: mock.patch.object(Journey, "_released", _released_at_once),
        "released while it may still be pulled",
    ),
    "lost lease": (lambda: mock.patch.object(Journey, "_released", _never_released), "is lost|second lease"),
    "second use of a lease": (
        lambda: mock.patch.object(Journey, "_tell_of_lease", _always_told),
        "used a second time",
    ),
    "poison goes on": (
        lambda: mock.patch.object(Journey, "_is_poison", property(_tries_on)),
        "after 2 deaths",
    ),
    "first token twice": (
        lambda: mock.patch.dict(journeys._HANDLERS, {(Stage.PREFILL, steps.Prefilled): _first_token_twice}),
        "first token comes twice",
    ),
    "answer forgotten": (
        lambda: mock.patch.object(Journey, "_emit", _forgotten),
        "does not get the answer so far",
    ),
    "lease of an answer that was handed over forgotten": (
        lambda: mock.patch.dict(journeys._HANDLERS, {(Stage.DECODE, steps.HandedOver): _lease_forgotten}),
        "is lost",
    ),
    "migrates for ever": (
        lambda: mock.patch.object(Journey, "_migrate", _migrates_for_ever),
        "tried for ever",
    ),
}
