"""The input side of a session, and how far it is ahead of the engine: pure, also against a plain model."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import generation_pb2 as generation

from cluster_core.errors import ClientFault, InvalidInputError, OutOfOrderError, OutOfRangeError, StaleRevisionError
from control_plane.sessions.backlog import Backlog
from control_plane.sessions.session import TRANSITIONS, Append, Command, Finish, Input, InputState, Session, Update

APPEND, UPDATE = generation.SESSION_MODE_APPEND, generation.SESSION_MODE_UPDATE
HEAD, TAIL = [1, 2], [8, 9]


def session(mode: generation.SessionMode.ValueType = UPDATE, room: int = 20) -> Session:
    return Session(mode, HEAD, TAIL, max_prompt_tokens=room)


# The table.


def test_every_state_and_input_has_an_answer() -> None:
    assert set(TRANSITIONS) == set(InputState)
    assert TRANSITIONS[InputState.OPEN].keys() == set(Input)


def test_nothing_leaves_a_cancelled_session_and_nothing_opens_a_finished_one_again() -> None:
    assert TRANSITIONS[InputState.CANCELLED] == {}
    assert InputState.OPEN not in TRANSITIONS[InputState.FINISHED].values()


@pytest.mark.parametrize("kind", [Input.APPEND, Input.UPDATE, Input.FINISH])
def test_a_finished_session_takes_no_input_and_says_so(kind: Input) -> None:
    finished = session()
    finished.take_in(finished.finished_with([]))

    with pytest.raises(OutOfOrderError, match=f"{kind.value}: the session is finished"):
        finished.check(kind)


# Composition.


def test_a_prompt_is_head_context_closing_tail() -> None:
    opened = session()

    commands = [
        opened.take_in(opened.appended([3])),
        opened.take_in(opened.appended([4, 5])),
        opened.take_in(opened.finished_with([6])),
    ]

    assert commands == [Append([3]), Append([4, 5]), Finish([6, 8, 9])]
    assert opened.tokens == [1, 2, 3, 4, 5, 6, 8, 9]


def test_a_tail_that_comes_with_finish_replaces_the_one_kept_for_it() -> None:
    opened = session()

    assert opened.take_in(opened.finished_with([], [7, 7, 7])) == Finish([7, 7, 7])
    assert opened.tokens == [1, 2, 7, 7, 7]


@pytest.mark.parametrize(
    ("context", "command"),
    [
        ([3, 4, 5], None),
        ([3, 4, 5, 6], Update(5, [6])),
        ([3, 4], Update(4, [])),
        ([3, 7], Update(3, [7])),
        ([7], Update(2, [7])),
        ([], Update(2, [])),
    ],
)
def test_an_update_keeps_the_longest_common_prefix(context: list[int], command: Update | None) -> None:
    opened = session()
    opened.take_in(opened.appended([3, 4, 5]))

    assert opened.take_in(opened.updated(1, context)) == command
    assert opened.tokens == HEAD + context


def test_an_empty_append_is_taken_in_and_says_nothing_to_the_worker() -> None:
    opened = session()

    assert opened.take_in(opened.appended([])) is None
    assert (opened.inputs, opened.tokens) == (1, HEAD)


def test_a_first_revision_may_be_any_and_the_next_has_to_be_above_it() -> None:
    opened = session()
    opened.take_in(opened.updated(0, [3]))

    with pytest.raises(StaleRevisionError, match=r"update\.revision: must be above 0, .* got 0"):
        opened.take_in(opened.updated(0, [4]))

    assert opened.take_in(opened.updated(5, [4])) == Update(2, [4])


def test_in_append_mode_an_update_is_refused() -> None:
    with pytest.raises(OutOfOrderError, match=r"update: .* mode APPEND"):
        session(APPEND).take_in(session(APPEND).updated(1, []))


def test_a_prefix_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(OutOfRangeError, match=r"open\.prefix: makes a prompt of 4 tokens, .* leaves 3"):
        session(room=3)


def test_an_empty_prompt_is_refused_at_finish_and_the_session_stays_open() -> None:
    opened = Session(UPDATE, [], [], max_prompt_tokens=9)

    with pytest.raises(InvalidInputError, match="finish: the prompt has no tokens"):
        opened.take_in(opened.finished_with([]))

    assert opened.take_in(opened.appended([3])) == Append([3])


# Against a plain model.

tokens = st.lists(st.integers(0, 3), max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), tokens),
        st.tuples(st.just("update"), tokens, st.integers(0, 6)),
        st.tuples(st.just("finish"), tokens),
        st.tuples(st.just("cancel")),
    ),
    max_size=25,
)


class PlainWorker:
    """Does what the commands say."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = list(prompt)

    def take(self, command: Command | None) -> None:
        if isinstance(command, Update):
            self.prompt = self.prompt[: command.keep_tokens] + list(command.token_ids)
        elif command is not None:
            self.prompt = self.prompt + list(command.token_ids)


@given(st.sampled_from([APPEND, UPDATE]), tokens, tokens, st.integers(16, 30), steps)
def test_any_input_leaves_worker_and_session_with_the_prompt_of_a_plain_model(
    mode: generation.SessionMode.ValueType, head: list[int], tail: list[int], room: int, inputs: list[tuple[Any, ...]]
) -> None:
    opened = Session(mode, head, tail, max_prompt_tokens=room)
    worker = PlainWorker(opened.tokens)
    context: list[int] = []
    revision, state, complete = -1, "open", False
    for kind, *arguments in inputs:
        before = (list(opened.tokens), opened.state, opened.revision, opened.inputs, opened.received_tokens)
        given_tokens: list[int] = arguments[0] if arguments else []
        replaced = given_tokens if kind == "update" else context + given_tokens
        allowed = state == "open" or (kind == "cancel" and state == "finished")
        if kind == "update":
            allowed = allowed and mode == UPDATE and arguments[1] > revision
        if kind != "cancel":
            allowed = allowed and len(head) + len(replaced) + len(tail) <= room
        if kind == "finish":
            allowed = allowed and bool(head or replaced or tail)
        try:
            if kind == "append":
                worker.take(opened.take_in(opened.appended(given_tokens)))
            elif kind == "update":
                worker.take(opened.take_in(opened.updated(arguments[1], given_tokens)))
            elif kind == "finish":
                worker.take(opened.take_in(opened.finished_with(given_tokens)))
            else:
                opened.cancel()
        except ClientFault as error:
            assert not allowed
            assert error.field
            after = (list(opened.tokens), opened.state, opened.revision, opened.inputs, opened.received_tokens)
            assert after == before
            continue
        assert allowed
        context = context if kind == "cancel" else replaced
        revision = arguments[1] if kind == "update" else revision
        state = {"finish": "finished", "cancel": "cancelled"}.get(kind, state)
        complete = complete or kind == "finish"
        assert worker.prompt == opened.tokens == head + context + (tail if complete else [])
        opened.check_invariants()


# The backlog.


def progress(**values: int) -> generation.SessionProgress:
    return generation.SessionProgress(**values)


def test_there_is_room_while_inputs_on_their_way_are_below_the_limit() -> None:
    backlog = Backlog(max_unapplied_inputs=2, max_backlog_tokens=1000)
    backlog.attach(5)
    seen = [backlog.has_room]
    for prompt_tokens in (6, 7):
        backlog.sent(prompt_tokens, 1)
        seen.append(backlog.has_room)
    backlog.progressed(progress(inputs=1))

    assert [*seen, backlog.has_room] == [True, True, False, True]


def test_there_is_room_while_waiting_tokens_are_at_most_the_limit() -> None:
    backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=10)
    backlog.attach(10)
    at_the_limit = backlog.has_room
    backlog.sent(11, 1)
    above = backlog.has_room
    backlog.progressed(progress(inputs=1, ready_tokens=1))

    assert (at_the_limit, above, backlog.has_room) == (True, False, True)


def test_tokens_that_were_computed_and_then_preempted_do_not_stop_the_client() -> None:
    backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=10)
    backlog.attach(20)
    backlog.progressed(progress(ready_tokens=20))
    computed = backlog.has_room
    backlog.progressed(progress(ready_tokens=0))

    assert (computed, backlog.has_room) == (True, True)


def test_of_a_prompt_that_is_replaced_the_tokens_on_their_way_are_bounded_and_not_those_to_compute() -> None:
    backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=10, replaces=True)
    backlog.attach(1000)
    assert backlog.has_room, "the whole prompt is still to be computed, and may be replaced before"
    backlog.sent(1000, 8)
    one = backlog.has_room
    backlog.sent(1000, 8)
    two = backlog.has_room
    backlog.progressed(progress(inputs=1))
    assert (one, two, backlog.has_room) == (True, False, True)


def test_a_session_is_computed_once_the_engine_has_taken_all_of_it_in_and_keeps_its_last_token_for_later() -> None:
    backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=100)
    assert not backlog.is_computed, "no worker has it"
    backlog.attach(4)
    seen = [backlog.is_computed]
    backlog.progressed(progress(prompt_tokens=4, ready_tokens=3))
    seen.append(backlog.is_computed)
    backlog.sent(6, 2)
    seen.append(backlog.is_computed)
    backlog.progressed(progress(inputs=1, prompt_tokens=6, ready_tokens=4))
    seen.append(backlog.is_computed)
    backlog.progressed(progress(inputs=1, prompt_tokens=6, ready_tokens=6))
    seen.append(backlog.is_computed)
    assert seen == [False, True, False, False, True]


def test_a_session_is_put_off_until_a_worker_has_it() -> None:
    backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=100)
    seen = [backlog.is_idle]
    backlog.put_off()
    seen.append(backlog.is_idle)
    backlog.attach(4)
    seen.append(backlog.is_idle)
    assert seen == [False, True, False]


def test_without_a_worker_there_is_room() -> None:
    backlog = Backlog(max_unapplied_inputs=1, max_backlog_tokens=1)
    backlog.attach(100)
    backlog.detach()

    assert backlog.has_room


def test_what_lost_workers_computed_stays_in_the_sums() -> None:
    opened, backlog = session(), Backlog(10, 1000)
    backlog.attach(2)
    opened.take_in(opened.appended([3, 4]))
    backlog.sent(4, 2)
    backlog.progressed(progress(inputs=1, computed_tokens=3, prompt_tokens=4, ready_tokens=3, received_tokens=4))
    backlog.detach()
    between = backlog.progress(opened)
    backlog.attach(4)
    opened.take_in(opened.appended([5]))
    backlog.sent(5, 1)
    backlog.progressed(progress(computed_tokens=2, prompt_tokens=4, ready_tokens=2, received_tokens=4))

    assert between == progress(inputs=1, computed_tokens=3, prompt_tokens=4, received_tokens=4)
    assert backlog.progress(opened) == progress(
        inputs=1, computed_tokens=5, prompt_tokens=4, ready_tokens=2, received_tokens=5
    )
    record = generation.SessionRecord(tokens=progress(computed_tokens=5, prompt_tokens=5, ready_tokens=5, inputs=1))
    backlog.completed(record, opened)
    assert record.tokens == progress(inputs=2, computed_tokens=8, prompt_tokens=5, ready_tokens=5, received_tokens=5)


@given(st.integers(0, 10_000))
def test_inputs_told_to_the_client_never_go_back(seed: int) -> None:
    """Whatever is sent, applied and lost."""
    rng = random.Random(seed)
    opened, backlog = Session(APPEND, [], [], max_prompt_tokens=1000), Backlog(5, 10)
    told, applied, sent = 0, 0, 0
    for _ in range(40):
        move = rng.choice(["attach", "detach", "append", "apply"])
        if move == "attach":
            backlog.attach(len(opened.tokens))
            applied = sent = 0
        elif move == "detach":
            backlog.detach()
        elif move == "append" and backlog.has_room:
            opened.take_in(opened.appended([1]))
            if backlog.attached:
                backlog.sent(len(opened.tokens), 1)
                sent += 1
        elif move == "apply" and backlog.attached and applied < sent:
            applied += 1
            backlog.progressed(progress(inputs=applied))
        assert told <= backlog.progress(opened).inputs <= opened.inputs
        assert backlog.unapplied_inputs <= 5
        told = backlog.progress(opened).inputs
