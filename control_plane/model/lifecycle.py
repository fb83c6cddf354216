"""The lifecycle of a request, as a literal table. Every request ends exactly once, in one outcome.

The shape follows h11's state machines: `TRANSITIONS[state][event]` is the next state, anything else is a defect and
raises with the request's history.
"""

from dataclasses import dataclass, field
from enum import Enum

from cluster_core.ids import RequestId
from control_plane.model.request_trace import RequestTrace


class State(Enum):
    RECEIVED = "received"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    # Outcomes.
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class Event(Enum):
    ADMITTED = "admitted"
    PLACED = "placed"
    PLACED_DECODE_ONLY = "placed_decode_only"
    FIRST_TOKEN = "first_token"
    DECODE_STARTED = "decode_started"
    HANDED_OVER = "handed_over"
    WORKER_LOST = "worker_lost"
    ENDED = "ended"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    DEADLINE_PASSED = "deadline_passed"
    FAULT = "fault"


_GIVEN_UP = {
    Event.REFUSED: State.REFUSED,
    Event.CANCELLED: State.CANCELLED,
    Event.DEADLINE_PASSED: State.EXPIRED,
    Event.FAULT: State.FAILED,
}

TRANSITIONS: dict[State, dict[Event, State]] = {
    State.RECEIVED: {Event.ADMITTED: State.QUEUED, **_GIVEN_UP},
    State.QUEUED: {
        Event.PLACED: State.PREFILLING,
        Event.PLACED_DECODE_ONLY: State.HANDING_OFF,
        # Resumed by a client that had all of it but its completion.
        Event.ENDED: State.FINISHED,
        **_GIVEN_UP,
    },
    State.PREFILLING: {
        Event.FIRST_TOKEN: State.HANDING_OFF,
        Event.ENDED: State.FINISHED,
        Event.WORKER_LOST: State.QUEUED,
        **_GIVEN_UP,
    },
    State.HANDING_OFF: {Event.DECODE_STARTED: State.DECODING, Event.WORKER_LOST: State.HANDING_OFF, **_GIVEN_UP},
    # The answer goes on elsewhere.
    State.DECODING: {
        Event.ENDED: State.FINISHED,
        Event.HANDED_OVER: State.HANDING_OFF,
        Event.WORKER_LOST: State.QUEUED,
        **_GIVEN_UP,
    },
}

OUTCOMES = frozenset({State.FINISHED, State.REFUSED, State.CANCELLED, State.EXPIRED, State.FAILED})


class IllegalTransition(AssertionError):
    """An event that the table does not allow: a defect of the router."""


@dataclass(slots=True)
class RequestLifecycle:
    """Where one request stands. `at` advances it; `history` tells how it came there."""

    request_id: RequestId
    state: State = State.RECEIVED
    history: list[tuple[State, Event]] = field(default_factory=list)
    # Where its time goes.
    trace: RequestTrace = field(default_factory=RequestTrace)

    def at(self, event: Event) -> State:
        following = TRANSITIONS.get(self.state, {}).get(event)
        if following is None:
            path = " ".join(f"{state.value} -{past.value}->" for state, past in self.history)
            raise IllegalTransition(f"{self.request_id}: {path} {self.state.value} has no `{event.value}`")
        self.history.append((self.state, event))
        self.state = following
        return following

    @property
    def ended(self) -> bool:
        return self.state in OUTCOMES
