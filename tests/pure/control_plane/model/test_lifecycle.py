"""The lifecycle table of a request: one outcome, always reachable, and nothing that the table does not name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.ids import RequestId
from control_plane.model.lifecycle import OUTCOMES, TRANSITIONS, Event, IllegalTransition, RequestLifecycle, State

NAME = RequestId("req-1")


def reachable_from(state: State) -> set[State]:
    seen, edge = {state}, {state}
    while edge:
        edge = {following for known in edge for following in TRANSITIONS.get(known, {}).values()} - seen
        seen |= edge
    return seen


@pytest.mark.parametrize("state", list(State))
def test_every_state_reaches_an_outcome(state: State) -> None:
    assert reachable_from(state) & OUTCOMES


def test_every_state_is_reachable_from_the_first() -> None:
    assert reachable_from(State.RECEIVED) == set(State)


def test_outcomes_are_the_states_without_a_way_out() -> None:
    assert {state for state in State if not TRANSITIONS.get(state)} == OUTCOMES


@pytest.mark.parametrize("state", [state for state in State if state not in OUTCOMES])
@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (Event.CANCELLED, State.CANCELLED),
        (Event.DEADLINE_PASSED, State.EXPIRED),
        (Event.FAULT, State.FAILED),
        (Event.REFUSED, State.REFUSED),
    ],
)
def test_every_running_state_can_be_given_up(state: State, event: Event, outcome: State) -> None:
    assert RequestLifecycle(NAME, state).at(event) is outcome


@pytest.mark.parametrize("outcome", [state for state in State if state in OUTCOMES])
@pytest.mark.parametrize("event", list(Event))
def test_nothing_happens_after_an_outcome(outcome: State, event: Event) -> None:
    lifecycle = RequestLifecycle(NAME, outcome)

    with pytest.raises(IllegalTransition):
        lifecycle.at(event)

    assert lifecycle.state is outcome


def test_an_illegal_transition_raises_with_the_history() -> None:
    lifecycle = RequestLifecycle(NAME)
    lifecycle.at(Event.ADMITTED)
    lifecycle.at(Event.PLACED)

    with pytest.raises(
        IllegalTransition, match="req-1: received -admitted-> queued -placed-> prefilling has no `admitted`"
    ):
        lifecycle.at(Event.ADMITTED)


def test_a_request_with_a_lost_prefill_and_a_lost_decode_worker_still_finishes() -> None:
    lifecycle = RequestLifecycle(NAME)
    path = [
        (Event.ADMITTED, State.QUEUED),
        (Event.PLACED, State.PREFILLING),
        (Event.WORKER_LOST, State.QUEUED),
        (Event.PLACED, State.PREFILLING),
        (Event.FIRST_TOKEN, State.HANDING_OFF),
        (Event.WORKER_LOST, State.HANDING_OFF),
        (Event.DECODE_STARTED, State.DECODING),
        (Event.ENDED, State.FINISHED),
    ]
    for event, state in path:
        assert not lifecycle.ended
        assert lifecycle.at(event) is state

    assert lifecycle.ended
    assert [event for _, event in lifecycle.history] == [event for event, _ in path]


def test_an_answer_whose_decode_worker_is_lost_begins_again_elsewhere() -> None:
    lifecycle = RequestLifecycle(NAME, State.DECODING)
    assert lifecycle.at(Event.WORKER_LOST) is State.QUEUED
    assert lifecycle.at(Event.PLACED) is State.PREFILLING


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_any_walk_ends_in_at_most_one_outcome_and_keeps_its_history(events: list[Event]) -> None:
    lifecycle = RequestLifecycle(NAME)
    outcomes = []
    taken = []
    for event in events:
        before = lifecycle.state
        try:
            lifecycle.at(event)
        except IllegalTransition:
            assert lifecycle.state is before
            continue
        taken.append((before, event))
        if lifecycle.ended:
            outcomes.append(lifecycle.state)

    assert len(outcomes) <= 1
    assert lifecycle.history == taken
