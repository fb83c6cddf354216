"""Journeys of every kind, played against the model of `played_journey`; and bugs planted in them, which it notices."""

import random
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.journey import JourneyLimits
from control_plane.dispatch.journey_steps import Stage
from control_plane.model.job import NO_HANDOFF, RECOMPUTED
from tests.pure.control_plane.dispatch.planted_journeys import PLANTED
from tests.pure.control_plane.dispatch.played_journey import FIRST, MORE, PULLED, PlayedJourney, new_job, worker

_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=14,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
_SEEDS = 400


class Fortune(Enum):
    """How a call ends."""

    WELL = "well"
    LOST = "lost"
    DEAD = "dead"
    DRAINING = "draining"
    # It drained while it had the request.
    LEFT = "left"
    UNREACHABLE = "unreachable"
    STALLED = "stalled"
    # It drains, and the next one pulls from it.
    HANDED_OVER = "handed_over"
    # No worker is there, or the KV cannot be had.
    WITHOUT = "without"


_LOSSES = {
    Fortune.LOST: steps.WorkerLost("lost"),
    Fortune.DEAD: steps.WorkerLost("lost", has_died=True),
    Fortune.DRAINING: steps.WorkerLost("lost", is_draining=True),
    Fortune.LEFT: steps.WorkerLost("lost", is_draining=True, was_left=True),
    Fortune.UNREACHABLE: steps.WorkerLost("lost", is_unreachable=True),
    Fortune.STALLED: steps.WorkerLost("lost", has_stalled=True),
}


def begun(rng_choice: Callable[[list[Any]], Any]) -> PlayedJourney:
    limits = JourneyLimits(rng_choice([1, 2, 3]), worker_wait_s=10.0, handoff_deadline_s=8.0)
    job = new_job(max_tokens=rng_choice([1, 8, 8, 8]), deadline_s=rng_choice([20.0, 600.0]))
    return PlayedJourney.begun(job, limits)


def answer(played: PlayedJourney, fortune: Fortune) -> None:
    """The event by which the call that the journey waits for ends, or goes on."""
    call, well = played.call, fortune is Fortune.WELL
    match call:
        case steps.Route() | steps.PlacePrefill():
            chosen = worker(f"prefill-{len(played.failed_prefill)}") if fortune is not Fortune.WITHOUT else None
            played.tell(steps.Placed(chosen, decode_is_usable=fortune is not Fortune.DRAINING))
        case steps.AwaitPrompt():
            played.tell(steps.PromptComplete())
        case steps.PlaceDecode():
            number = len(played.failed_decode) + len(played.broken_decode)
            # Also one that it is only to be kept from while there is another one.
            number -= bool(played.broken_decode) and fortune is Fortune.UNREACHABLE
            chosen = worker(f"decode-{number}") if fortune is not Fortune.WITHOUT else None
            played.tell(steps.Placed(chosen))
        case steps.CallPrefill() if fortune is Fortune.LEFT:
            played.tell(_LOSSES[Fortune.DRAINING])
        case steps.CallDecode(request_id=name) if fortune is Fortune.HANDED_OVER and played.decode_started:
            played.tell(steps.HandedOver(name))
        case steps.CallDecode() if fortune is Fortune.STALLED and played.decode_started and not call.may_move:
            played.tell(_LOSSES[Fortune.DEAD])
        case steps.CallPrefill() | steps.CallDecode() if fortune in _LOSSES:
            played.tell(_LOSSES[fortune])
        case steps.CallPrefill():
            is_over = not call.hand_off
            first = FIRST if not played.told_tokens else f"token {played.told_tokens}"
            played.tell(steps.Prefilled(first, (played.told_tokens,), 1, finish_reason=1 if is_over else None))
        case steps.CallDecode(pulls=pulls) if not played.decode_started:
            outcome = PULLED if well else RECOMPUTED
            played.tell(steps.DecodeStarted(outcome if pulls else NO_HANDOFF))
        case steps.CallDecode():
            goes_on = well and played.told_tokens < played.journey.job.max_tokens - 1
            played.tell(steps.Generated(MORE, (played.told_tokens,), 1) if goes_on else steps.Ended(1, 8))
        case None if played.journey.stage is Stage.DECODE_CALL_ENDS:
            played.tell(steps.WorkerLost("lost", is_draining=fortune is Fortune.DRAINING, has_died=well))


def waits(played: PlayedJourney) -> bool:
    """Something may still come: of a call, or of one that has given the whole answer and has not ended."""
    return played.call is not None or played.journey.stage is Stage.DECODE_CALL_ENDS


class Journeys(RuleBasedStateMachine):
    """One request. Workers answer, fail, drain, or are not there; time passes; the client may leave at any time."""

    played: PlayedJourney

    @initialize(draw=st.data())
    def begin(self, draw: st.DataObject) -> None:
        self.played = begun(lambda values: draw.draw(st.sampled_from(values)))

    @precondition(lambda self: waits(self.played) and not self.played.closed)
    @rule(fortune=st.sampled_from(Fortune), seconds=st.sampled_from([0.0, 0.0, 1.0, 7.0]))
    def answered(self, fortune: Fortune, seconds: float) -> None:
        self.played.now_s += seconds
        answer(self.played, fortune)

    @rule(leaves=st.integers(0, 9))
    def client_leaves(self, leaves: int) -> None:
        if leaves == 9 and not self.played.closed:
            self.played.close()

    def teardown(self) -> None:
        if hasattr(self, "played") and not self.played.closed:
            self.played.close()


def test_no_journey_loses_a_lease_uses_one_twice_or_repeats_the_first_token() -> None:
    run_state_machine_as_test(Journeys, settings=_SETTINGS)


def play(seed: int) -> None:
    """One journey to its end, or until its client leaves."""
    rng = random.Random(seed)
    played = begun(rng.choice)
    for _ in range(rng.randrange(20)):
        if not waits(played):
            break
        played.now_s += rng.choice([0.0, 0.0, 1.0, 7.0])
        answer(played, rng.choice([Fortune.WELL, Fortune.WELL, *Fortune]))
    played.close()


def test_seeded_journeys_hold_every_rule() -> None:
    for seed in range(_SEEDS):
        play(seed)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_noticed(name: str) -> None:
    plant, sentence = PLANTED[name]
    with plant(), pytest.raises(AssertionError, match=sentence):
        for seed in range(_SEEDS):
            play(seed)
