"""Answers that go on elsewhere after they have begun: what is remembered of them, and when they end."""

from dataclasses import replace

import pytest

from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.exclusions import MOST_FAILURES
from control_plane.model.job import NO_HANDOFF, RECOMPUTED, Lease
from tests.pure.control_plane.dispatch.played_journey import (
    D0,
    D1,
    FINISHED,
    FIRST,
    LIMITS,
    MORE,
    P0,
    P1,
    PULLED,
    PlayedJourney,
    decoding,
    new_job,
    prefilled,
    worker,
)


def answering() -> PlayedJourney:
    """As `decoding`, and two tokens of the answer have come."""
    played = PlayedJourney.begun()
    played.now_s = 0.5
    played.tell(steps.Placed(P0))
    played.now_s = 1.0
    played.tell(steps.Prefilled(FIRST, (0,), 3, cached_tokens=2))
    played.tell(steps.Placed(D0))
    played.tell(steps.DecodeStarted(PULLED, kv_bytes=64))
    played.tell(steps.Generated(MORE, (1,), 4))
    return played


@pytest.mark.parametrize("is_draining", [False, True])
def test_an_answer_that_has_begun_goes_on_elsewhere_after_the_last_token_that_was_emitted(is_draining: bool) -> None:
    played = answering()
    told = played.tell(steps.WorkerLost("broke off", is_draining=is_draining))
    assert told == (steps.MarkDraining(D0) if is_draining else steps.Suspect(D0, "broke off"), steps.Route())

    played.now_s = 5.0
    played.tell(steps.Placed(P1))
    assert played.waits_for(steps.CallPrefill).hand_off
    job = played.journey.job
    assert (job.emitted, job.emitted_chars, job.migrations, job.route.migrations) == ([0, 1], 7, 1, 1)
    told = played.tell(steps.Prefilled("third", (2,), 1))
    assert told[0] == steps.Emit("third"), "a prompt counts once"
    played.tell(steps.Placed(D1))
    assert played.waits_for(steps.CallDecode).pulls
    played.tell(steps.DecodeStarted(RECOMPUTED))
    played.tell(steps.Ended(FINISHED, 8, "last"))
    played.close()

    assert played.emitted == [FIRST, MORE, "third", "last"]
    assert played.endings == [steps.Complete(FINISHED, 8)]
    assert (job.first_token_s, job.dispatched_s, job.cached_tokens) == (1.0, 0.5, 2), "times are those of the first go"
    assert (job.route.prefill_worker_id, job.route.decode_worker_id) == ("prefill-0", "decode-1")
    assert job.prefilled_by == "prefill-1", "its KV lies with the last one"
    assert (job.route.handoff, job.route.kv_bytes) == (PULLED, 64)


def test_a_last_token_needs_no_decode_worker_where_the_answer_goes_on() -> None:
    played = PlayedJourney.begun(new_job(max_tokens=3))
    played.tell(steps.Placed(None))
    played.tell(steps.PromptComplete())
    played.tell(steps.Placed(D0))
    played.tell(steps.DecodeStarted(NO_HANDOFF))
    played.tell(steps.Generated(MORE, (0, 1), 2))
    played.tell(steps.WorkerLost())
    played.tell(steps.Placed(P0))
    assert not played.waits_for(steps.CallPrefill).hand_off

    played.tell(steps.Prefilled("third", (2,), 1, FINISHED, completion_tokens=3))
    played.close()

    assert played.endings == [steps.Complete(FINISHED, 3)]


def test_what_comes_with_the_end_is_emitted_before_it() -> None:
    told = answering().tell(steps.Ended(FINISHED, 3, "last"))
    assert told == (steps.Emit("last"), steps.Complete(FINISHED, 3))


def test_an_answer_goes_on_as_often_as_something_comes_of_it() -> None:
    played = answering()
    for number in range(2, 7):
        played.tell(steps.WorkerLost())
        played.tell(steps.Placed(None))
        played.tell(steps.PromptComplete())
        played.tell(steps.Placed(D1))
        played.tell(steps.DecodeStarted(NO_HANDOFF))
        played.tell(steps.Generated(MORE, (number,), 1))
    assert (played.journey.job.migrations, played.endings) == (5, [])
    played.close()


@pytest.mark.parametrize("most", [0, 2])
def test_an_answer_goes_on_elsewhere_no_more_often_than_it_may(most: int) -> None:
    played = PlayedJourney.begun(limits=replace(LIMITS, max_migrations=most))
    for number in range(most + 1):
        played.tell(steps.Placed(None))
        played.tell(steps.PromptComplete())
        played.tell(steps.Placed(D0))
        assert played.waits_for(steps.CallDecode).may_move is (number < most)
        played.tell(steps.DecodeStarted(NO_HANDOFF))
        played.tell(steps.Generated(MORE, (number,), 1))
        told = played.tell(steps.WorkerLost("gone"))

    assert told[-1] == steps.Fail(steps.Cause.DECODE_WORKER_LOST, "gone", 1000)
    played.close()


def test_before_its_answer_has_begun_a_request_is_tried_again_whatever_may_migrate() -> None:
    played = PlayedJourney.begun(limits=replace(LIMITS, max_migrations=0))
    played.tell(steps.Placed(None))
    played.tell(steps.PromptComplete())
    played.tell(steps.Placed(D0))

    played.tell(steps.WorkerLost())

    assert played.waits_for(steps.PlaceDecode)
    played.close()


def test_two_decode_workers_that_are_lost_without_a_token_end_an_answer_that_has_begun() -> None:
    played = answering()
    played.tell(steps.WorkerLost())
    played.tell(steps.Placed(None))
    played.tell(steps.PromptComplete())
    played.tell(steps.Placed(D1))
    played.tell(steps.DecodeStarted(NO_HANDOFF))
    told = played.tell(steps.WorkerLost("again"))
    assert told == (steps.Suspect(D1, "again"), steps.Fail(steps.Cause.DECODE_WORKER_LOST, "again", 1000))
    played.close()


def test_answers_leave_draining_workers_without_an_end() -> None:
    played = answering()
    for _ in range(4):
        played.tell(steps.WorkerLost(is_draining=True))
        played.tell(steps.Placed(None))
        played.tell(steps.PromptComplete())
        played.tell(steps.Placed(D1))
        played.tell(steps.DecodeStarted(NO_HANDOFF))
    assert played.endings == []
    played.close()


def test_an_answer_that_is_handed_over_is_pulled_from_the_worker_that_drains() -> None:
    played = answering()
    assert played.tell(steps.HandedOver("r.2")) == (played.call,), "that it drains is known from the registry"
    place = played.waits_for(steps.PlaceDecode)
    assert (place.prefills, place.excluded) == (False, frozenset({("decode-0", 1)}))
    played.tell(steps.Placed(D1))
    assert played.waits_for(steps.CallDecode).pulls
    assert played.journey.job.prefilled_by == "decode-0"
    told = played.tell(steps.DecodeStarted(RECOMPUTED))
    assert told == (steps.Release(Lease(D0, "r.2")),), "the worker that was told does not pull any more"
    played.tell(steps.Ended(FINISHED, 8, "last"))
    played.close()

    job = played.journey.job
    assert played.emitted == [FIRST, MORE, "last"]
    assert (job.migrations, job.route.migrations) == (1, 1)
    assert (job.route.handoff, job.route.kv_bytes) == (PULLED, 64), "figures are those of the first go"


def test_a_worker_that_was_left_is_not_marked_as_draining_which_may_be_over() -> None:
    told = answering().tell(steps.WorkerLost(is_draining=True, was_left=True))
    assert told == (steps.Route(),)


def test_a_worker_that_is_resumed_does_not_pull_its_own_lease() -> None:
    played = answering()
    played.tell(steps.HandedOver("r.2"))
    played.tell(steps.Placed(D1))
    played.tell(steps.WorkerLost(is_unreachable=True))
    played.tell(steps.Placed(D0))
    assert not played.waits_for(steps.CallDecode).pulls
    assert played.tell(steps.DecodeStarted(NO_HANDOFF))[0] == steps.Release(Lease(D0, "r.2", 15.0 + played.now_s))
    played.close()


def test_the_lease_of_an_answer_that_is_handed_over_is_used_once() -> None:
    played = answering()
    played.tell(steps.HandedOver("r.2"))
    played.tell(steps.Placed(D1))
    played.tell(steps.WorkerLost())
    assert played.waits_for(steps.PlaceDecode).prefills
    played.tell(steps.Placed(D0))
    assert not played.waits_for(steps.CallDecode).pulls
    played.close()


def test_a_draining_worker_that_was_left_may_have_pulled_so_the_next_one_computes() -> None:
    played = decoding()
    played.tell(steps.WorkerLost(is_draining=True, was_left=True))
    assert played.waits_for(steps.PlaceDecode).prefills
    played.tell(steps.Placed(D1))
    assert not played.waits_for(steps.CallDecode).pulls
    played.close()


def test_a_worker_that_was_not_reached_has_not_touched_the_lease_and_counts_as_no_attempt() -> None:
    played = prefilled()
    for number in range(4):
        played.tell(steps.Placed(worker(f"decode-{number}")))
        assert played.waits_for(steps.CallDecode).pulls
        played.tell(steps.WorkerLost("refused", is_unreachable=True))
    place = played.waits_for(steps.PlaceDecode)
    assert (len(place.avoided), place.excluded) == (4, frozenset())
    played.close()


def test_the_only_worker_that_is_never_reached_is_gone_back_to_a_few_times() -> None:
    """It may answer whoever asks how it is, and not take the request: then nobody waits for it to the deadline."""
    played = prefilled()
    for _ in range(MOST_FAILURES):
        assert played.waits_for(steps.PlaceDecode).excluded == frozenset()
        played.tell(steps.Placed(D0))
        played.tell(steps.WorkerLost("refused", is_unreachable=True))
    place = played.waits_for(steps.PlaceDecode)
    assert (place.avoided, place.excluded) == (frozenset(), frozenset({("decode-0", 1)}))
    played.close()


def test_a_worker_is_left_for_any_other_one_that_is_usable_by_then() -> None:
    played = decoding()
    played.tell(steps.WorkerLost("it hangs"))
    played.tell(steps.Placed(D1))
    played.tell(steps.WorkerLost(is_draining=True, was_left=True))
    assert played.waits_for(steps.PlaceDecode).excluded == frozenset({("decode-1", 1)})
    played.close()
