"""The rules of a request's way, one test each: attempts, exclusions, leases, deadlines."""

from dataclasses import replace

import pytest

from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.exclusions import MOST_STALLS
from control_plane.dispatch.journey import Journey, JourneyLimits, UnexpectedEvent
from control_plane.model.job import NO_HANDOFF, RECOMPUTED
from control_plane.model.lifecycle import State
from tests.pure.control_plane.dispatch.played_journey import (
    D0,
    D1,
    D2,
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


def test_a_prompt_goes_through_both_pools_and_its_lease_ends_with_the_pull() -> None:
    played = decoding()
    assert played.waits_for(steps.CallDecode).pulls

    played.tell(steps.DecodeStarted(PULLED, cached_tokens=3))
    played.tell(steps.Generated("more"))
    played.tell(steps.Ended(FINISHED, 2))
    played.close()

    assert played.emitted == [FIRST, "more"]
    assert played.endings == [steps.Complete(FINISHED, 2)]
    assert played.journey.job.lifecycle.state is State.FINISHED
    assert played.journey.job.route.prefill_worker_id == "prefill-0"
    assert played.journey.job.route.decode_worker_id == "decode-0"


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_worker_that_is_lost_after_the_whole_answer_costs_the_request_nothing(is_draining: bool) -> None:
    played = decoding()
    played.tell(steps.DecodeStarted(PULLED))
    played.tell(steps.Ended(FINISHED, 2))
    told = played.tell(steps.WorkerLost("socket closed", is_draining=is_draining))
    played.close()

    assert told == (steps.MarkDraining(D0) if is_draining else steps.Suspect(D0, "socket closed"),)
    assert played.endings == [steps.Complete(FINISHED, 2)]
    assert played.journey.job.lifecycle.state is State.FINISHED


def test_a_worker_that_does_both_decodes_what_it_has_prefilled_without_a_pull_and_keeps_it_until_then() -> None:
    played = prefilled()
    played.tell(steps.Placed(P0))
    assert not played.waits_for(steps.CallDecode).pulls
    assert played.journey.lease is not None, "what it is to find in its cache stays there"

    (release,) = played.tell(steps.DecodeStarted(NO_HANDOFF))
    assert isinstance(release, steps.Release) and release.lease.safe_at_s == 0.0
    assert played.journey.job.route.handoff == NO_HANDOFF, "nothing went over the wire, and nothing was computed twice"


def test_a_worker_that_has_begun_anew_since_it_prefilled_computes_the_prompt_again() -> None:
    played = prefilled()
    played.tell(steps.Placed(replace(P0, generation=P0.generation + 1)))
    assert not played.waits_for(steps.CallDecode).pulls
    played.tell(steps.DecodeStarted(NO_HANDOFF))
    assert played.journey.job.route.handoff == RECOMPUTED


def test_an_answer_of_one_token_needs_no_decode_worker_and_holds_no_lease() -> None:
    played = PlayedJourney.begun(new_job(max_tokens=1))
    played.tell(steps.Placed(P0, decode_is_usable=False))
    assert not played.waits_for(steps.CallPrefill).hand_off

    played.tell(steps.Prefilled(FIRST, finish_reason=FINISHED))
    played.close()

    assert played.endings == [steps.Complete(FINISHED, 1)]
    assert played.journey.job.lifecycle.state is State.FINISHED


def test_where_no_prefill_worker_is_chosen_the_decode_worker_computes_the_prompt() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(None))
    played.waits_for(steps.AwaitPrompt)
    played.tell(steps.PromptComplete())
    assert played.waits_for(steps.PlaceDecode).prefills

    played.tell(steps.Placed(D0))

    assert not played.waits_for(steps.CallDecode).pulls
    played.tell(steps.DecodeStarted(NO_HANDOFF, cached_tokens=2))
    assert played.journey.job.cached_tokens == 2
    played.close()


def test_a_whole_prompt_is_not_prefilled_for_a_decode_pool_that_is_not_there() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0, decode_is_usable=False))
    played.waits_for(steps.AwaitPrompt)
    played.close()
    assert played.leases == {}


def test_a_prompt_that_still_grows_is_prefilled_while_no_decode_worker_is_there() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0, prompt_is_whole=False, decode_is_usable=False))
    played.waits_for(steps.CallPrefill)
    played.close()


def test_a_lost_prefill_worker_is_replaced_and_its_lease_given_back() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0))
    told = played.tell(steps.WorkerLost("gone"))

    suspect, release, place = told
    assert suspect == steps.Suspect(P0, "gone")
    assert isinstance(release, steps.Release) and release.lease.safe_at_s == 0.0
    assert place == steps.PlacePrefill(frozenset({("prefill-0", 1)}))


def test_after_as_many_losses_as_allowed_the_decode_pool_does_without_a_prefill_worker() -> None:
    played = PlayedJourney.begun()
    for chosen in (P0, P1):
        played.tell(steps.Placed(chosen))
        played.tell(steps.WorkerLost())
    played.waits_for(steps.AwaitPrompt)
    assert played.losses == LIMITS.prefill_attempts
    played.close()


def test_a_worker_that_lacks_the_adapter_is_left_out_of_this_request_and_believed_by_others() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0))
    told = played.tell(steps.WorkerLost("no adapter", lacks_adapter=True))
    assert not any(isinstance(each, steps.Suspect | steps.MarkDraining | steps.Blame) for each in told)
    assert played.waits_for(steps.PlacePrefill).excluded == {("prefill-0", 1)}
    played.close()


def test_a_decode_worker_that_lacks_the_adapter_has_not_touched_the_lease() -> None:
    played = decoding()
    played.tell(steps.WorkerLost("no adapter", lacks_adapter=True))
    played.tell(steps.Placed(D1))
    assert played.waits_for(steps.CallDecode).pulls
    played.close()


def test_a_draining_worker_counts_as_no_attempt() -> None:
    played = PlayedJourney.begun()
    for name in ("prefill-0", "prefill-1", "prefill-2"):
        played.tell(steps.Placed(worker(name)))
        told = played.tell(steps.WorkerLost(is_draining=True))
        assert told[0] == steps.MarkDraining(worker(name))
    assert len(played.waits_for(steps.PlacePrefill).excluded) == 3
    played.close()


def test_a_draining_decode_worker_has_not_touched_the_lease_which_is_offered_again() -> None:
    played = decoding()
    played.tell(steps.WorkerLost(is_draining=True))
    played.tell(steps.Placed(D1))
    assert played.waits_for(steps.CallDecode).pulls
    played.close()


def test_a_decode_worker_that_is_lost_may_have_used_up_the_lease_so_the_next_one_computes() -> None:
    played = decoding()
    played.tell(steps.WorkerLost())
    assert played.waits_for(steps.PlaceDecode).prefills
    played.tell(steps.Placed(D1))
    assert not played.waits_for(steps.CallDecode).pulls

    played.now_s = 2.0
    (release,) = played.tell(steps.DecodeStarted(NO_HANDOFF))

    assert isinstance(release, steps.Release)
    assert release.lease.safe_at_s == LIMITS.handoff_deadline_s
    assert played.journey.job.route.handoff == RECOMPUTED


def test_the_worker_that_was_told_of_the_lease_may_give_it_up_at_once() -> None:
    played = decoding()
    (release,) = played.tell(steps.DecodeStarted(RECOMPUTED))
    assert isinstance(release, steps.Release) and release.lease.safe_at_s == 0.0


def test_a_client_that_leaves_has_its_lease_released_only_when_nobody_pulls_any_more() -> None:
    played = prefilled()
    played.now_s = 4.0
    played.tell(steps.Placed(D0))

    (release,) = played.journey.handle(steps.Closed(), 5.0)

    assert isinstance(release, steps.Release)
    assert release.lease.safe_at_s == 4.0 + LIMITS.handoff_deadline_s


def test_a_client_that_leaves_before_decode_has_its_lease_released_at_once() -> None:
    (release,) = prefilled().journey.handle(steps.Closed(), 1.0)
    assert isinstance(release, steps.Release) and release.lease.safe_at_s == 0.0


def test_nothing_is_released_twice() -> None:
    played = decoding()
    played.tell(steps.DecodeStarted(RECOMPUTED))
    assert played.journey.handle(steps.Closed(), 1.0) == ()
    assert played.journey.handle(steps.Closed(), 2.0) == ()


def test_a_hand_off_that_comes_too_late_is_not_offered() -> None:
    played = prefilled()
    played.now_s = LIMITS.handoff_deadline_s
    played.tell(steps.Placed(D0))
    assert not played.waits_for(steps.CallDecode).pulls
    played.tell(steps.DecodeStarted(NO_HANDOFF))
    assert played.journey.job.route.handoff == RECOMPUTED
    played.close()


def test_two_lost_decode_workers_end_the_request() -> None:
    played = decoding()
    played.tell(steps.WorkerLost())
    played.tell(steps.Placed(D1))
    played.tell(steps.WorkerLost("again"))
    assert played.endings == [steps.Fail(steps.Cause.DECODE_WORKER_LOST, "again", 1000)]
    played.close()


def test_workers_that_seem_to_hang_are_gone_back_to_a_few_times_and_then_left_for_others_alone() -> None:
    played, both = decoding(), {(each.worker_id, each.generation) for each in (D0, D1)}
    for number in range(MOST_STALLS):
        left, other = (D0, D1) if number % 2 == 0 else (D1, D0)
        assert not played.waits_for(steps.CallDecode).hung
        played.tell(steps.WorkerLost("it hangs", has_stalled=True))
        assert played.waits_for(steps.PlaceDecode).excluded == {(left.worker_id, left.generation)}
        played.tell(steps.Placed(other))
    assert played.waits_for(steps.CallDecode).hung == both, "where there is no other, this one is waited for"

    played.tell(steps.WorkerLost("it hangs", has_stalled=True))
    assert played.waits_for(steps.PlaceDecode).excluded == both
    played.tell(steps.Placed(D2))
    played.tell(steps.DecodeStarted(NO_HANDOFF))
    played.tell(steps.Generated(MORE, (1,), 1))
    played.tell(steps.Ended(1, 2))
    assert isinstance(played.endings[0], steps.Complete)
    played.close()


def test_a_worker_that_hangs_takes_no_attempt_from_those_that_die() -> None:
    played = decoding()
    for event in (steps.WorkerLost("it hangs", has_stalled=True), steps.WorkerLost(), steps.WorkerLost("again")):
        assert not played.endings
        played.tell(event)
        if not played.endings:
            played.tell(steps.Placed(D1))
    assert played.endings == [steps.Fail(steps.Cause.DECODE_WORKER_LOST, "again", 1000)]
    played.close()


def test_no_decode_worker_in_time_is_said_with_a_retry_hint() -> None:
    played = prefilled()
    assert played.waits_for(steps.PlaceDecode).most_s(0.0) == LIMITS.worker_wait_s
    played.now_s = LIMITS.worker_wait_s
    played.tell(steps.Placed(None))
    sentence = "no decode worker was ready for 30.0 s"
    assert played.endings == [steps.Fail(steps.Cause.NO_DECODE_WORKER, sentence, 2000)]
    played.close()


def test_the_wait_for_a_decode_worker_ends_with_the_deadline() -> None:
    played = prefilled(PlayedJourney.begun(new_job(deadline_s=10.0)))
    assert played.waits_for(steps.PlaceDecode).most_s(0.0) == 10.0
    played.now_s = 10.0
    played.tell(steps.Placed(None))
    assert played.endings == [steps.Fail(steps.Cause.DEADLINE, "the request's deadline passed")]


@pytest.mark.parametrize("chosen", [P0, None])
def test_nothing_is_called_after_the_deadline(chosen: object) -> None:
    played = PlayedJourney.begun(new_job(deadline_s=10.0))
    played.now_s = 10.0
    played.tell(steps.Placed(chosen))  # type: ignore[arg-type]
    if chosen is None:
        played.tell(steps.PromptComplete())
    assert played.endings == [steps.Fail(steps.Cause.DEADLINE, "the request's deadline passed")]
    played.close()
    assert played.leases == {}


def test_without_prefill_attempts_every_prompt_is_computed_where_it_decodes() -> None:
    limits = JourneyLimits(prefill_attempts=0, worker_wait_s=1.0, handoff_deadline_s=1.0)
    PlayedJourney.begun(limits=limits).waits_for(steps.AwaitPrompt)


def test_exclusions_of_one_pool_do_not_reach_the_other() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0))
    played.tell(steps.WorkerLost())
    played.tell(steps.Placed(P1))
    played.tell(steps.Prefilled(FIRST))
    assert played.waits_for(steps.PlaceDecode).excluded == frozenset()
    played.close()


def test_times_are_those_of_the_events() -> None:
    played = PlayedJourney.begun()
    played.now_s = 1.0
    played.tell(steps.Placed(P0))
    played.now_s = 2.0
    played.tell(steps.Prefilled(FIRST, cached_tokens=2, engine_queue_ms=7.0))
    job = played.journey.job
    assert (job.dispatched_s, job.first_token_s, job.cached_tokens, job.engine_queue_ms) == (1.0, 2.0, 2, 7.0)


@pytest.mark.parametrize(
    "event", [steps.Prefilled(), steps.DecodeStarted(PULLED), steps.Ended(1, 1), steps.WorkerLost(), steps.Begun()]
)
def test_an_event_that_cannot_come_is_a_defect_with_the_stage_in_its_sentence(event: steps.Event) -> None:
    journey = Journey(new_job(), LIMITS)
    journey.handle(steps.Begun(), 0.0)
    with pytest.raises(UnexpectedEvent, match="while route"):
        journey.handle(event, 0.0)


def test_two_deaths_in_prefill_are_poison_and_nobody_else_gets_it() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0))
    told = played.tell(steps.WorkerLost("gone", has_died=True))
    assert told[:2] == (steps.Suspect(P0, "gone"), steps.Blame(P0))
    played.waits_for(steps.PlacePrefill)
    played.tell(steps.Placed(P1))
    played.tell(steps.WorkerLost("gone", has_died=True))

    (failure,) = played.endings
    assert isinstance(failure, steps.Fail)
    assert (failure.cause, failure.retry_after_ms) == (steps.Cause.POISON, 0)
    assert played.journey.job.deaths == 2
    played.close()


def test_one_death_in_each_pool_is_poison_too() -> None:
    played = PlayedJourney.begun()
    played.tell(steps.Placed(P0))
    played.tell(steps.WorkerLost(has_died=True))
    played.tell(steps.Placed(P1))
    played.tell(steps.Prefilled(FIRST))
    played.tell(steps.Placed(D0))
    told = played.tell(steps.WorkerLost(has_died=True))
    assert isinstance(told[-1], steps.Fail) and told[-1].cause is steps.Cause.POISON
    played.close()


def test_an_answer_goes_on_after_a_death_unless_it_is_the_second() -> None:
    for deaths in (0, 1):
        played = decoding()
        played.journey.job.deaths = deaths
        played.tell(steps.DecodeStarted(PULLED))
        *_, blame, follows = played.tell(steps.WorkerLost(has_died=True))
        assert blame == steps.Blame(D0)
        assert follows == steps.Route() or (isinstance(follows, steps.Fail) and follows.cause is steps.Cause.POISON)
        assert isinstance(follows, steps.Route) is (deaths == 0)
        played.close()


def test_a_worker_that_cannot_be_reached_has_not_died_of_the_request() -> None:
    played = PlayedJourney.begun()
    for chosen in (P0, P1):
        played.tell(steps.Placed(chosen))
        assert steps.Blame(chosen) not in played.tell(steps.WorkerLost("cut off"))
    played.waits_for(steps.AwaitPrompt)
    played.close()
